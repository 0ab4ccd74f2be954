"""Talks of stock clients over five turns: what each sends is written down, as it sends it.

python recorded_clients.py URL MODEL EOS FOLDER [NAME...] asks a server that runs and writes
FOLDER/NAME.json, in a Python that has openai, langchain-openai, llama-index-llms-openai-like,
haystack-ai, openai-agents, instructor and litellm. A tool is called in the first turn and prints
nothing; in the third the call is cut. Open WebUI and LibreChat are no libraries: their turns are
written here, in the shape of theirs.
"""

import asyncio
import contextlib
import http.client
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

QUESTIONS = ("Is it warm in Toba?", "And in Oslo?", "Thanks.")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "What the weather is.", "parameters": CITY}
TOOL = {"type": "function", "function": WEATHER}
NAMED = {"type": "function", "function": {"name": "weather"}}
SHORT, LONG = 7, 90  # tokens: of a call that is cut, and of all else


class Recorder(ThreadingHTTPServer):
    """Hands requests on to a server; the bodies of those that ask are kept."""

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to = urlsplit(url)
        self.seen: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        link = http.client.HTTPConnection(str(self.server.to.hostname), self.server.to.port)
        link.request("POST", self.path, raw, {"content-type": "application/json"})
        answer = link.getresponse()
        body = answer.read()
        self.server.seen.append({"path": self.path, "body": json.loads(raw)})
        if answer.status != 200:
            print(answer.status, body[:500], file=sys.stderr)
        self.send_response(answer.status)
        self.send_header("content-type", str(answer.getheader("content-type")))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        link.close()

    def log_message(self, *_: Any) -> None:
        pass


class Asked:
    """Where is asked, and how: drawn, and soon at an end."""

    def __init__(self, url: str, model: str, eos: str, closing: list[int]) -> None:
        self.url, self.model = f"{url}/v1", model
        self.bias = dict.fromkeys(map(str, closing), 9) | dict.fromkeys(eos.split(","), 12)
        self.drawn = {"temperature": 1.0, "seed": 4}
        self.usual = {**self.drawn, "logit_bias": self.bias}


def openai_chat(at: Asked) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=at.url, api_key="any", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]

    def turn(**more: Any) -> list[Any]:
        told = client.chat.completions.create(
            model=at.model, messages=messages, tools=[TOOL],
            **{"max_tokens": LONG, **at.usual, **more},
        )  # fmt: skip
        messages.append(told.choices[0].message)
        return told.choices[0].message.tool_calls or []

    def results(calls: list[Any], text: str) -> None:
        messages.extend({"role": "tool", "tool_call_id": it.id, "content": text} for it in calls)

    messages.append({"role": "user", "content": QUESTIONS[0]})
    results(turn(tool_choice="required"), "")
    turn()
    messages.append({"role": "user", "content": QUESTIONS[1]})
    results(turn(tool_choice=NAMED, max_tokens=SHORT), "not run")
    turn()
    messages.append({"role": "user", "content": QUESTIONS[2]})
    with client.chat.completions.stream(
        model=at.model, messages=messages, max_tokens=LONG, **at.usual
    ) as stream:
        for _ in stream:
            pass


def openai_responses(at: Asked) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=at.url, api_key="any", max_retries=0)
    items: list[Any] = []

    def turn(**more: Any) -> list[Any]:
        told = client.responses.create(
            model=at.model, input=items, tools=[{"type": "function", **WEATHER, "strict": True}],
            instructions="Be brief.", temperature=1.0,
            extra_body={"seed": 4, "logit_bias": at.bias},
            **{"max_output_tokens": LONG, "store": False, **more},
        )  # fmt: skip
        items.extend(told.output)
        return [it for it in told.output if it.type == "function_call"]

    def results(calls: list[Any], text: str) -> None:
        for it in calls:
            items.append({"type": "function_call_output", "call_id": it.call_id, "output": text})

    items.append({"role": "user", "content": QUESTIONS[0]})
    results(turn(tool_choice="required"), "")
    turn()
    items.append({"role": "user", "content": [{"type": "input_text", "text": QUESTIONS[1]}]})
    cut = {"type": "function", "name": "weather"}
    results(turn(tool_choice=cut, max_output_tokens=SHORT), "not run")
    turn()
    items.append({"role": "user", "content": QUESTIONS[2]})
    turn()


def langchain_openai(at: Asked) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def chat(**more: Any) -> Any:
        return ChatOpenAI(
            base_url=at.url, api_key="any", model=at.model, max_retries=0, temperature=1.0, seed=4,
            logit_bias=at.bias, **{"max_tokens": LONG, **more},
        )  # fmt: skip

    messages: list[Any] = [SystemMessage("Be brief.")]

    def turn(llm: Any, **more: Any) -> None:
        messages.append(llm.bind_tools([TOOL], **more).invoke(messages))

    def results(text: str) -> None:
        last = messages[-1]
        for call in [*last.tool_calls, *last.invalid_tool_calls]:
            messages.append(ToolMessage(text, tool_call_id=call["id"]))

    messages.append(HumanMessage(QUESTIONS[0]))
    turn(chat(), tool_choice="any")
    results("")
    turn(chat())
    messages.append(HumanMessage([{"type": "text", "text": QUESTIONS[1]}]))
    turn(chat(max_tokens=SHORT), tool_choice="weather")
    results("not run")
    turn(chat())
    messages.append(HumanMessage(QUESTIONS[2]))
    for _ in chat().stream(messages):
        pass


def llama_index(at: Asked) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel, Field

    class Place(BaseModel):
        city: str = Field(max_length=6)

    def weather(city: str) -> str:
        """What the weather is."""
        return ""

    tool = FunctionTool.from_defaults(weather, fn_schema=Place)

    def llm(most: int) -> Any:
        return OpenAILike(
            model=at.model, api_base=at.url, api_key="any", is_chat_model=True, max_retries=0,
            is_function_calling_model=True, context_window=2048, max_tokens=most,
            temperature=1.0, additional_kwargs={"seed": 4, "logit_bias": at.bias},
        )  # fmt: skip

    messages = [ChatMessage(role="system", content="Be brief.")]

    def turn(most: int = LONG, **more: Any) -> None:
        told = llm(most).chat_with_tools(
            [tool], chat_history=messages, allow_parallel_tool_calls=True, **more
        )
        messages.append(told.message)

    def results(text: str) -> None:
        for call in messages[-1].additional_kwargs.get("tool_calls", []):
            messages.append(
                ChatMessage(role="tool", content=text, additional_kwargs={"tool_call_id": call.id})
            )

    messages.append(ChatMessage(role="user", content=QUESTIONS[0]))
    turn(tool_required=True)
    results("")
    turn()
    messages.append(ChatMessage(role="user", content=QUESTIONS[1]))
    turn(SHORT, tool_choice="weather")
    results("not run")
    turn()
    messages.append(ChatMessage(role="user", content=QUESTIONS[2]))
    for _ in llm(LONG).stream_chat(messages):
        pass


def haystack(at: Asked) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    tool = Tool("weather", "What the weather is.", CITY, lambda city: "")
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("any"), model=at.model, api_base_url=at.url, max_retries=0,
        tools=[tool],
    )  # fmt: skip
    messages = [ChatMessage.from_system("Be brief.")]

    def turn(most: int = LONG, **more: Any) -> None:
        settings = {**at.usual, "max_completion_tokens": most, **more}
        messages.extend(generator.run(messages, generation_kwargs=settings)["replies"])

    def results(text: str) -> None:
        for it in messages[-1].tool_calls:
            messages.append(ChatMessage.from_tool(tool_result=text, origin=it))

    messages.append(ChatMessage.from_user(QUESTIONS[0]))
    turn(tool_choice="required")
    results("")
    turn()
    messages.append(ChatMessage.from_user(QUESTIONS[1]))
    turn(SHORT, tool_choice=NAMED)  # it drops a call that is cut, and sends an empty answer
    turn()
    messages.append(ChatMessage.from_user(QUESTIONS[2]))
    turn()


def _agents(at: Asked, kind: str) -> None:
    import agents as sdk
    from openai import AsyncOpenAI
    from pydantic import Field

    sdk.set_tracing_disabled(True)

    @sdk.function_tool
    def weather(city: Annotated[str, Field(max_length=6)]) -> str:
        """What the weather is."""
        return ""

    client = AsyncOpenAI(base_url=at.url, api_key="any", max_retries=0)
    made = getattr(sdk, kind)(model=at.model, openai_client=client)

    async def talk() -> None:
        items: list[Any] = []
        turns = ((QUESTIONS[0], LONG, "required"), (QUESTIONS[1], SHORT, "weather"),
                 (QUESTIONS[2], LONG, "auto"))  # fmt: skip
        for question, most, choice in turns:
            settings = sdk.ModelSettings(
                temperature=1.0, max_tokens=most, tool_choice=choice,
                extra_body={"seed": 4, "logit_bias": at.bias},
            )  # fmt: skip
            agent = sdk.Agent(
                name="helper", instructions="Be brief.", tools=[weather], model=made,
                model_settings=settings,
            )  # fmt: skip
            items.append({"role": "user", "content": question})
            run = await sdk.Runner.run(agent, items, max_turns=3)
            items = run.to_input_list()

    asyncio.run(talk())


def agents_chat(at: Asked) -> None:
    _agents(at, "OpenAIChatCompletionsModel")


def agents_responses(at: Asked) -> None:
    _agents(at, "OpenAIResponsesModel")


def _instructor(at: Asked, mode: Literal["TOOLS", "JSON", "JSON_SCHEMA"]) -> None:
    """Nothing that is answered suits it, so that it asks again four times."""
    import instructor
    from instructor.core.exceptions import InstructorRetryException
    from openai import OpenAI
    from pydantic import BaseModel, Field, field_validator

    class Place(BaseModel):
        city: str = Field(max_length=6)

        @field_validator("city")
        @classmethod
        def known(cls, value: str) -> str:
            raise ValueError(f"there is no {value!r}")

    client = instructor.from_openai(
        OpenAI(base_url=at.url, api_key="any", max_retries=0), mode=instructor.Mode[mode]
    )
    with contextlib.suppress(InstructorRetryException):
        client.chat.completions.create(
            model=at.model, response_model=Place, max_retries=4, max_tokens=LONG, **at.usual,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
        )  # fmt: skip


def instructor_tools(at: Asked) -> None:
    _instructor(at, "TOOLS")


def instructor_json(at: Asked) -> None:
    _instructor(at, "JSON")


def instructor_json_schema(at: Asked) -> None:
    _instructor(at, "JSON_SCHEMA")


def litellm(at: Asked) -> None:
    import litellm as lib

    lib.telemetry = False
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]

    def turn(**more: Any) -> list[Any]:
        told = lib.completion(
            model=f"openai/{at.model}", api_base=at.url, api_key="any", messages=messages,
            tools=[TOOL], max_retries=0, **{"max_tokens": LONG, **at.usual, **more},
        )  # fmt: skip
        messages.append(told.choices[0].message)
        return told.choices[0].message.tool_calls or []

    def results(calls: list[Any], text: str) -> None:
        for it in calls:
            result = {"role": "tool", "tool_call_id": it.id, "name": "weather", "content": text}
            messages.append(result)

    messages.append({"role": "user", "content": QUESTIONS[0]})
    results(turn(tool_choice="required"), "")
    turn()
    messages.append({"role": "user", "content": QUESTIONS[1]})
    results(turn(tool_choice=NAMED, max_tokens=SHORT), "not run")
    turn()
    messages.append({"role": "user", "content": QUESTIONS[2]})
    for _ in lib.completion(
        model=f"openai/{at.model}", api_base=at.url, api_key="any", messages=messages, stream=True,
        max_tokens=LONG, max_retries=0, **at.usual,
    ):  # fmt: skip
        pass


def _streamed(at: Asked, body: dict[str, Any]) -> dict[str, Any]:
    """A message of what came piece by piece, put together as browsers do."""
    import httpx

    content, calls = "", dict[int, dict[str, Any]]()
    told = httpx.post(f"{at.url}/chat/completions", json=body, timeout=300).raise_for_status()
    for line in told.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            content += choice["delta"].get("content") or ""
            for new in choice["delta"].get("tool_calls") or []:
                if call := calls.get(new["index"]):
                    call["function"]["arguments"] += new["function"]["arguments"]
                else:
                    calls[new["index"]] = new
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def open_webui(at: Asked) -> None:
    """Its native calls: streams, each call with its index, a result without a name."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]

    def turn(**more: Any) -> None:
        body = {
            "stream": True, "model": at.model, "messages": messages, "max_tokens": LONG,
            "stream_options": {"include_usage": True}, "tools": [TOOL], **at.usual, **more,
        }  # fmt: skip
        messages.append(_streamed(at, body))

    def results(text: str) -> None:
        for it in messages[-1].get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": it["id"], "content": text})

    messages.append({"role": "user", "content": QUESTIONS[0]})
    turn(tool_choice="required")
    results("")
    turn()
    messages.append({"role": "user", "content": [{"type": "text", "text": QUESTIONS[1]}]})
    turn(tool_choice=NAMED, max_tokens=SHORT)
    for it in messages[-1].get("tool_calls", []):
        part = {"type": "text", "text": "not run"}
        messages.append({"role": "tool", "tool_call_id": it["id"], "content": [part]})
    turn()
    messages.append({"role": "assistant", "content": ""})  # an answer that was stopped
    messages.append({"role": "user", "content": QUESTIONS[2]})
    turn(tools=[])


def librechat(at: Asked) -> None:
    """Its agents: who asks is named, contents are parts, a result has the name of its tool."""
    rules = {"role": "developer", "content": "Be brief."}
    messages: list[Any] = [rules]

    def asked(text: str) -> None:
        messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def turn(**more: Any) -> None:
        body = {
            "model": at.model, "user": "6f1c0ffee", "stream": True, "messages": messages,
            "stream_options": {"include_usage": True}, "tools": [TOOL], "max_tokens": LONG,
            "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, **at.usual, **more,
        }  # fmt: skip
        told = _streamed(at, body)
        for it in told.get("tool_calls", []):
            del it["index"]
        if not told.get("tool_calls"):
            told["content"] = [{"type": "text", "text": told["content"]}]
        messages.append(told)

    def results(text: str) -> None:
        for it in messages[-1].get("tool_calls", []):
            messages.append(
                {"role": "tool", "tool_call_id": it["id"], "name": "weather", "content": text}
            )

    asked(QUESTIONS[0])
    turn(tool_choice="required")
    results("")
    turn()
    asked(QUESTIONS[1])
    turn(tool_choice=NAMED, max_tokens=SHORT)
    results("not run")
    turn()
    asked(QUESTIONS[2])
    turn()


CLIENTS = {  # by name: the talk, and the package that has the version
    "openai-chat": (openai_chat, "openai"),
    "openai-responses": (openai_responses, "openai"),
    "langchain-openai": (langchain_openai, "langchain-openai"),
    "llama-index": (llama_index, "llama-index-llms-openai-like"),
    "haystack": (haystack, "haystack-ai"),
    "agents-chat": (agents_chat, "openai-agents"),
    "agents-responses": (agents_responses, "openai-agents"),
    "instructor-tools": (instructor_tools, "instructor"),
    "instructor-json": (instructor_json, "instructor"),
    "instructor-json-schema": (instructor_json_schema, "instructor"),
    "litellm": (litellm, "litellm"),
    "open-webui": (open_webui, None),
    "librechat": (librechat, None),
}


def main(url: str, model: str, eos: str, folder: str, *names: str) -> None:
    """Write what each sends."""
    import httpx

    closing = httpx.post(f"{url}/tokenize", json={"prompt": '" }'}).json()["tokens"]
    for name in names or CLIENTS:
        talk, package = CLIENTS[name]
        recorder = Recorder(url)
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        talk(Asked(f"http://127.0.0.1:{recorder.server_address[1]}", model, eos, closing))
        recorder.shutdown()
        kept = {
            "client": package or name,
            "version": "a shape" if package is None else version(package),
            "requests": recorder.seen,
        }
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(name, kept["version"], len(recorder.seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
