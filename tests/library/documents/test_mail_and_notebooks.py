"""Readers of .eml and .ipynb, and the files of a folder that nobody expects to be read."""

import json
from email.message import EmailMessage


def message(text="The salt wells.", html=None, attached=True):
    made = EmailMessage()
    made["Subject"] = "Wells of Yánjing"
    made["From"] = "Bo <bo@example.org>"
    made["To"] = "Ka <ka@example.org>"
    made["Date"] = "Thu, 04 Mar 2021 10:00:00 +0100"
    if text is not None:
        made.set_content(text)
    if html is not None and text is None:
        made.set_content(html, subtype="html")
    elif html is not None:
        made.add_alternative(html, subtype="html")
    if attached:
        made.add_attachment(b"\x89PNG", maintype="image", subtype="png", filename="wells.png")
    return made.as_bytes()


def test_a_message_is_its_text(tmp_path, read):
    (tmp_path / "a.eml").write_bytes(message(html="<p>The <b>salt</b> wells."))
    [mail] = read(tmp_path)[0]
    assert (mail.title, mail.text) == ("Wells of Yánjing", "The salt wells.")
    assert mail.metadata == {
        "from": "Bo <bo@example.org>", "to": "Ka <ka@example.org>",
        "date": "2021-03-04T10:00:00+01:00", "attachments": ["wells.png"],
        "left_out": [{"what": "attachments", "count": 1, "where": "wells.png"}],
    }  # fmt: skip


def test_a_message_without_plain_text_is_its_page(tmp_path, read):
    page = "<h1>Wells</h1><script>x</script><p>Salt."
    (tmp_path / "a.eml").write_bytes(message(None, page, attached=False))
    [mail] = read(tmp_path)[0]
    assert mail.text == "# Wells\n\nSalt."


def notebook(*cells, **metadata):
    made = [{"cell_type": kind, "source": source, "outputs": ["x"]} for kind, source in cells]
    return json.dumps({"cells": made, "metadata": metadata, "nbformat": 4})


def test_a_notebook_is_prose_and_code(tmp_path, read):
    cells = ("markdown", ["# Wells\n", "Salt."]), ("code", "print(1)\n"), ("code", " ")
    (tmp_path / "a.ipynb").write_text(notebook(*cells, language_info={"name": "python"}))
    [found] = read(tmp_path)[0]
    assert found.title == "Wells"
    assert found.text == "# Wells\nSalt.\n\n```python\nprint(1)\n```"


def test_pictures_of_a_folder_are_passed_over(tmp_path, read_here):
    for name in ("a.txt", "b.PNG", "sub/c.zip", "d.tex"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = {getattr(it, "id", None) or it.source for it in read_here([tmp_path])}
    assert found == {"a.txt", str(tmp_path / "d.tex")}
    [rest] = read_here([tmp_path / "d.tex"])
    assert rest.reason.endswith("; convert it, as with `pandoc FILE -o FILE.md`")
    [named] = read_here([tmp_path / "b.PNG"])
    assert "file type '.png' is not one of" in named.reason
