"""A Haystack pipeline whose answers come from `jaxrag serve`."""

import argparse

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret


def pipeline(url: str, model: str) -> Pipeline:
    """Asks ``{{question}}``; the server retrieves, so that nothing else stands in the prompt."""
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{question}}")]))
    made.add_component(
        "answer",
        OpenAIChatGenerator(
            model=model,
            api_base_url=url,
            api_key=Secret.from_token("none"),
            generation_kwargs={"extra_body": {"k": 6}},
        ),
    )
    made.connect("prompt.prompt", "answer.messages")
    return made


def main() -> None:
    """Ask one question, and print the answer and what of the prompt was read from the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="synthetic@village")
    args = parser.parse_args()
    found = pipeline(args.url, args.model).run({"prompt": {"question": args.question}})
    (reply,) = found["answer"]["replies"]
    usage = reply.meta["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{reply.text} ({cached} of {usage['prompt_tokens']} tokens from the store)")


if __name__ == "__main__":
    main()
