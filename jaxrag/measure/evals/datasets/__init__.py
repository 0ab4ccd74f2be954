"""Published data sets: their files as the authors give them, their prompts and their scores.

``table.DATASETS`` names them; each has a file of its own. ``run.run`` puts one to a model.
"""
