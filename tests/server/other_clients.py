"""Clients that want another version of openai than the tests have; run by test_other_clients.py.

python other_clients.py NAME URL MODEL EOS prints what came of it, as JSON.
"""

import asyncio
import json
import sys
from typing import Annotated

DRAWN = {"temperature": 1.0, "seed": 4}


async def agents(url, model, eos):
    """OpenAI's Agents SDK: a run over both interfaces, in which a tool is called and told about."""
    import agents as sdk
    from openai import AsyncOpenAI
    from pydantic import Field

    sdk.set_tracing_disabled(True)
    asked = []

    @sdk.function_tool
    def weather(city: Annotated[str, Field(max_length=8)]) -> str:
        """What the weather is."""
        asked.append(city)
        return "warm"

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    told = {}
    for name, made in (
        ("chat", sdk.OpenAIChatCompletionsModel),
        ("responses", sdk.OpenAIResponsesModel),
    ):
        settings = sdk.ModelSettings(
            temperature=1.0, max_tokens=150, tool_choice="required", parallel_tool_calls=False,
            extra_body={"seed": 4, "logit_bias": dict.fromkeys(eos.split(","), 12)},
        )  # fmt: skip
        agent = sdk.Agent(
            name="helper",
            instructions="Be brief.",
            tools=[weather],
            model=made(model=model, openai_client=client),
            model_settings=settings,
        )
        run = await sdk.Runner.run(agent, "Is it warm?", max_turns=3)
        kinds = [type(it).__name__ for it in run.new_items]
        told[name] = {
            "kinds": kinds,
            "final": run.final_output,
            "asked": list(asked),
            "turns": len(run.raw_responses),
        }
        asked.clear()
    return told


async def haystack(url, model, eos):
    """Haystack's generator: a call of a tool, and an answer of a form."""
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    city = {"type": "string", "maxLength": 8}
    form = {"type": "object", "properties": {"city": city}, "required": ["city"],
            "additionalProperties": False}  # fmt: skip
    tool = Tool("weather", "What the weather is.", form, lambda city: "warm")
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("any"), model=model, api_base_url=f"{url}/v1", max_retries=0
    )
    drawn = {**DRAWN, "max_completion_tokens": 150}
    asked = [ChatMessage.from_user("Is it warm?")]
    [called] = generator.run(
        asked, tools=[tool], generation_kwargs={**drawn, "tool_choice": "required"}
    )["replies"]
    result = [
        ChatMessage.from_tool(tool_result="warm", origin=it) for it in called.tool_calls or []
    ]
    schema = {"name": "place", "schema": form, "strict": True}
    [answer] = generator.run(
        [*asked, called, *result],
        generation_kwargs={
            **drawn,
            "response_format": {"type": "json_schema", "json_schema": schema},
        },
    )["replies"]
    return {
        "calls": [[it.tool_name, it.arguments] for it in called.tool_calls],
        "answer": answer.text,
        "finish": answer.meta["finish_reason"],
    }


if __name__ == "__main__":
    client = {"agents": agents, "haystack": haystack}[sys.argv[1]]
    print(json.dumps(asyncio.run(client(*sys.argv[2:]))))
