"""What is asked, before anything of it is tokenised: whether it can be read."""

import json
from collections.abc import Sequence

from jaxrag.base.errors import RequestError
from jaxrag.models.model import Model
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Conversation, Passage, Text, check_size
from jaxrag.serve.words import check_text, check_words

_FRAMED = ("tool_calls", "reasoning_content")  # what a template writes of messages, too


def check_readable(
    ask: Ask,
    model: Model,
    talk: Conversation,
    documents: Sequence[Text | Passage] | None,
    verbatim: bool,
) -> None:
    """RequestError for a conversation that cannot be read or answered.

    Messages of clients may be blank, but for a question that is put into another template.
    """
    given = () if documents is None else documents
    titles = (part.title for part in given if isinstance(part, Passage))
    texts = (part.text if isinstance(part, Passage) else part for part in given)
    said = (talk.system, talk.query or "", *talk.questions, *talk.answers)
    more = [message[name] for message in talk.messages for name in _FRAMED if name in message]
    framing = [part for part in (more, talk.framing.tools, talk.framing.values) if part]
    frame = json.dumps(framing, ensure_ascii=False) if framing else ""
    check_size(model, (*said, frame, *ask.blocks, *texts, *titles))
    *earlier, last = talk.questions
    if talk.messages and last == "" and not verbatim:
        raise RequestError(
            "the question is empty, or the last of messages is not of the user; ask something, or "
            "send them to the model alone"
        )
    for what, text, blank in (
        ("the system message", talk.system, True),
        *(("an earlier question", part, bool(talk.messages)) for part in earlier),
        *(("an earlier answer", answer, bool(talk.messages)) for answer in talk.answers),
        ("the question", last, verbatim),
    ):
        if isinstance(text, str) and (text.strip() or not blank):
            check_text(what, text)
    if isinstance(last, str):
        check_words(model.text_tokenizer(), last)
