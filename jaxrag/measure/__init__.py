"""How good answers are (``evals``), and how fast what is installed is (``bench``)."""
