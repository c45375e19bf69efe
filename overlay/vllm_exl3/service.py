"""What the owner of a running server needs beside vLLM's API, as one of vLLM's endpoint plugins: the door, a route that
empties the prefix cache, and counts of answers that run into loops (on /metrics).

vLLM has such a route in its developer mode only, together with others that run arbitrary methods in the workers. vLLM
loads an endpoint plugin only where VLLM_PLUGINS names it.
"""

import os

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import REGISTRY
from vllm.logger import init_logger

from vllm_exl3.answers import Answers, AnswerWatch
from vllm_exl3.door import errors, middleware, rules
from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.keys import Keys

logger = init_logger("vllm.exl3")  # below "vllm", so that vLLM's handlers show it

# Outside of /v1: there a client's API key opens, and emptying the cache is not for clients.
RESET_PATH = "/exl3/cache/reset"
# Made by the launcher for each start. Without it the route does not exist.
TOKEN_NAME = "EXL3_ADMIN_TOKEN"


class Service:
    """See vllm/plugins/endpoint_plugins/interface.py for who calls what."""

    name = "exl3"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine_client = None
        self.token = os.environ.get(TOKEN_NAME, "")
        self.owner = Keys([self.token])
        self.rules = rules.parse(os.environ)

    def attach_router(self, app: FastAPI) -> None:
        self.app = app
        answers = Answers()
        REGISTRY.register(answers)
        app.add_middleware(AnswerWatch, answers=answers)
        if self.token:
            app.add_api_route(RESET_PATH, self.reset_cache, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client, state, args) -> None:
        """vLLM has all its routes and middleware in place by now, and the door goes around them."""
        self.engine_client = engine_client
        client_keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
        tokenizer = None if args.skip_tokenizer_init else lambda: trial_tokenizer(engine_client.model_config)
        removed = middleware.install(self.app, self.rules, client_keys, self.token, tokenizer)
        logger.info("exl3: the door %s; routes that are not served: %s",
                    "asks for the key" if client_keys else "asks for no key", ", ".join(removed) or "none")  # fmt: skip

    async def reset_cache(self, request: Request) -> JSONResponse:
        """{"emptied": whether}: not while an answer holds a part of the cache; the caller may try again."""
        if not self.owner.open_with(request.headers.raw):
            refusal = Refusal(401, "invalid_token", "This route asks for the token of the server's start, no API key.")
            return Response(errors.body_of(refusal, RESET_PATH), 401, dict(errors.headers_of(refusal)))
        return JSONResponse({"emptied": bool(await self.engine_client.reset_prefix_cache())})


def trial_tokenizer(model_config) -> str:
    """xgrammar's tokenizer of the model, as JSON, made as vLLM's xgrammar backend makes it."""
    import xgrammar
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config=model_config)
    size = model_config.get_vocab_size()
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size).serialize_json()
