"""An agent of OpenAI's Agents SDK that has to call a tool, by chat completions of a cluster.

Run with openai-agents on PYTHONPATH: `python -m tests.ecosystem.agent BASE_URL API_KEY MODEL`. Prints a JSON
object: the arguments that the tool was called with, what the model was shown of it, and what it said, whole
and as it streamed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (  # type: ignore[import-not-found]
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CITIES = ({"city": "Paris"}, {"city": "Rome"})
WEATHER = "It rains tin."


async def main(base_url: str, api_key: str, model: str) -> None:
    set_tracing_disabled(True)
    asked: list[Any] = []

    async def weather(context: Any, arguments: str) -> str:
        asked.append(json.loads(arguments))
        return WEATHER

    tool = FunctionTool(
        name="weather",
        description="The weather of a city.",
        # Of an object's parts a model that knows nothing may write white space between, for ever.
        params_json_schema={"enum": list(CITIES)},
        on_invoke_tool=weather,
        strict_json_schema=False,
    )
    agent = Agent(
        name="forecaster",
        instructions="Say what the weather is.",
        tools=[tool],
        model=OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=base_url, api_key=api_key)),
        # Once it has called the tool, the framework lets it choose.
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=128, temperature=0.0
        ),
    )
    question = "What is the weather like in Paris?"
    whole = await Runner.run(agent, question, max_turns=4)
    streamed = Runner.run_streamed(agent, question, max_turns=4)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    shown = [item["output"] for item in whole.to_input_list() if item.get("type") == "function_call_output"]
    print(
        json.dumps(
            {
                "asked": asked,
                "shown": shown,
                "said": whole.final_output,
                "streamed": "".join(deltas),
                "tokens": whole.context_wrapper.usage.output_tokens,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
