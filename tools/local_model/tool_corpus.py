"""Tool conversations for the corpus: schemas, requests that need a tool, results, and plain questions."""

from __future__ import annotations

import json
import random

CITIES = (
    "Paris", "London", "Berlin", "Tokyo", "Rome", "Madrid", "Vienna", "Oslo", "Lisbon", "Prague", "New York",
    "San Francisco", "Zurich", "Munich", "Hamburg", "Cairo", "Sydney", "Toronto", "Boston", "Chicago", "Seoul",
    "Dublin", "Athens", "Warsaw", "Beijing", "Singapore", "Mumbai", "Geneva", "Los Angeles", "Reykjavik",
)  # fmt: skip
WEATHER_NAMES = ("get_weather", "get_current_weather", "weather", "fetch_weather", "weather_lookup")
WEATHER_ARGUMENTS = ("city", "location", "place", "town")
WEATHER_TEXTS = (
    "Get the weather for a city", "Get the current weather", "Weather of a place",
    "Get the current weather in a given location", "Returns the weather", "",
)  # fmt: skip
WEATHER_FORMS = (
    "What is the weather in {}?", "What's the weather like in {}?", "How is the weather in {} today?",
    "Tell me the weather in {}.", "Is it raining in {}?", "weather in {}", "What is the weather like in {} today?",
    "Weather for {}", "What is the temperature in {}?", "I need the weather for {}.",
    "Use the tool to get the weather in {}.",
    "Can you tell me the weather in {}?", "What's the weather in {} like?", "How cold is it in {}?", "Weather in {}?",
    "Will it rain in {}?", "How warm is it in {}?", "What's the weather in {}?", "Check the weather in {}.",
)  # fmt: skip
SUM_TOOLS = (
    (
        "add",
        "Add two numbers",
        ("What is {} plus {}?", "Add {} and {}.", "Use the tool to add {} and {}.", "What is {} + {}?"),
    ),
    (
        "multiply",
        "Multiply two numbers",
        ("What is {} times {}?", "Multiply {} and {}.", "Multiply {} by {}.", "What is {} * {}?"),
    ),
    ("subtract", "Subtract two numbers", ("What is {} minus {}?", "Subtract {} and {}.", "What is {} - {}?")),
    ("divide", "Divide two numbers", ("What is {} divided by {}?", "Divide {} by {}.", "What is {} / {}?")),
)
SUM_NAMES = ("{}", "{}_numbers", "{}_two_numbers", "calculator_{}")
SUM_ARGUMENTS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))
VERBS = (
    "get", "find", "search", "open", "delete", "send", "create", "book", "play", "show", "check", "read", "start",
    "stop", "list", "update", "look up", "fetch", "cancel", "order", "run", "add", "remove", "set", "turn on",
    "turn off",
    "query", "call", "print", "save", "load", "move", "rename", "describe", "summarise", "reserve", "buy", "sell",
    "track",
)  # fmt: skip
NOUNS = (
    "user", "order", "file", "song", "flight", "hotel", "ticket", "message", "page", "movie", "price", "stock",
    "email", "note", "task", "train", "map", "node", "log", "book", "recipe", "customer", "meeting", "room",
    "port", "service", "city", "country", "temperature", "light", "document", "database", "table", "account", "balance",
    "product", "package", "route", "event", "reminder", "alarm", "news", "rate", "currency", "word", "definition",
    "contact",
)  # fmt: skip
ARGUMENTS = (
    "name", "id", "query", "text", "title", "topic", "path", "number", "user_id", "value", "key", "item", "date",
    "target", "code", "symbol", "address", "order_id", "filename", "subject",
    "service", "city", "location", "country", "unit", "expression", "language", "amount", "currency", "to", "from",
    "url",
    "command", "input", "word", "product", "ticker", "recipient", "message", "start", "end", "count", "keyword",
)  # fmt: skip
ONE_VALUE_FORMS = (
    "{Verb} the {noun} {v}.", "Please {verb} the {noun} {v}.", "Can you {verb} the {noun} {v}?", "{Verb} {noun} {v}",
    "I want to {verb} the {noun} {v}.", "{Verb} the {noun} for {v}.", "Use {tool} with {a} {v}.",
    "Call {tool} for {v}.",
    "Call {tool} with {a} {v}.", "{Verb} the {noun} with {a} {v}.", "Could you {verb} the {noun} called {v}?",
    "{Verb} the {noun} of {v}.", "What is the {noun} of {v}?", "Which {noun} has {v}?", "{noun} for {v}",
    "{noun} of {v}?",
    "{Verb} {v}.", "{Verb} {v}", "Tell me the {noun} of {v}.", "I need the {noun} for {v}.", "{tool} {v}",
    "Show the {noun} {v}.",
    "Do {tool} with {v}.", "{Verb} the {noun} in {v}.",
)  # fmt: skip
TWO_VALUE_FORMS = (
    "{Verb} the {noun} with {a} {v} and {b} {w}.", "Use {tool} with {a} {v} and {b} {w}.",
    "Please {verb} the {noun} with {a} {v} and {b} {w}.", "Call {tool} with {a} {v} and {b} {w}.",
)  # fmt: skip
# What people add after a request; none of it belongs into an argument.
TAILS = (
    "",
    "",
    "",
    "",
    "",
    " please",
    " right now",
    " for me",
    " now",
    " today",
    " with the tool",
    " quickly",
    " tomorrow",
    " thanks",
)
LONG_TEXTS = (
    "Use this function when the user asks for it.", "Returns a JSON object.", "The result is a string.",
    "Only call it once.", "Looks into the database.", "Works for every value.", "This is a test function.",
)  # fmt: skip
EXPRESSION_TOOLS = (
    ("calculator", "Evaluate an arithmetic expression"), ("calculate", "Calculate an expression"),
    ("evaluate", "Evaluates a mathematical expression"), ("compute", "Compute the value of an expression"),
    ("math", "Do arithmetic"), ("calc", ""),
)  # fmt: skip
EXPRESSION_FORMS = (
    "What is {}?",
    "Calculate {}.",
    "Compute {}.",
    "{}",
    "Evaluate {}.",
    "How much is {}?",
    "Use the calculator for {}.",
)
CLOCK_FORMS = ("What time is it?", "Tell me the time.", "What is the current time?", "Which time is it now?")
SYLLABLES = (
    "ba", "ko", "ri", "tu", "la", "men", "sor", "vi", "qua", "zen", "dro", "pel", "mi", "gar", "fo", "nex", "hu",
    "lin", "ta", "wes", "jo", "ster", "ard", "ing", "ous", "xe", "ya", "bri", "cle", "un",
)  # fmt: skip


def random_word(rng: random.Random) -> str:
    word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))
    if rng.random() < 0.15:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
    return word.capitalize() if rng.random() < 0.6 else word


def random_value(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.25:
        return rng.choice(CITIES)
    if shape < 0.6:
        return random_word(rng)
    if shape < 0.75:
        return str(rng.randint(0, rng.choice((9, 99, 9999))))
    if shape < 0.85:
        return f"{random_word(rng)}{rng.choice('-_.')}{rng.choice((random_word(rng), str(rng.randint(0, 999))))}"
    return f"{random_word(rng)} {random_word(rng)}"


def _place(rng: random.Random) -> str:
    place = rng.choice(CITIES) if rng.random() < 0.4 else random_word(rng).capitalize()
    if rng.random() < 0.1:
        place += " " + random_word(rng).capitalize()
    if rng.random() < 0.12:
        place += ", " + rng.choice(("France", "Germany", "CA", "Japan", random_word(rng).capitalize()))
    return place


def _with_tail(question: str, rng: random.Random) -> str:
    tail = rng.choice(TAILS)
    if not tail:
        return question
    mark = question[-1] if question[-1] in ".?" else ""
    return question.removesuffix(mark) + tail + mark


def _longer(description: str, rng: random.Random) -> str:
    if rng.random() < 0.75:
        return description
    return (description + ". " + " ".join(rng.sample(LONG_TEXTS, rng.randint(1, 2)))).removeprefix(". ")


def _tool(name: str, arguments: tuple[str, ...], description: str) -> dict:
    """Only what the template shows: name, required arguments, description."""
    parameters = {"type": "object", "properties": {a: {"type": "string"} for a in arguments}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


Request = tuple[dict, str, dict[str, str]]  # (tool, question, arguments of the right call)


def weather_request(rng: random.Random) -> Request:
    argument, city = rng.choice(WEATHER_ARGUMENTS), _place(rng)
    tool = _tool(rng.choice(WEATHER_NAMES), (argument,), _longer(rng.choice(WEATHER_TEXTS), rng))
    return tool, _with_tail(rng.choice(WEATHER_FORMS).format(city), rng), {argument: city}


def sum_request(rng: random.Random) -> Request:
    verb, description, forms = rng.choice(SUM_TOOLS)
    names = rng.choice(SUM_ARGUMENTS)
    values = [str(rng.randint(0, rng.choice((9, 99, 999)))) for _ in names]
    tool = _tool(rng.choice(SUM_NAMES).format(verb), names, description)
    return tool, rng.choice(forms).format(*values), dict(zip(names, values, strict=True))


def generic_request(rng: random.Random) -> Request:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    name = f"{verb}_{noun}".replace(" ", "_")
    count = 2 if rng.random() < 0.3 else 1
    arguments = tuple(rng.sample(ARGUMENTS, count))
    values = [random_value(rng) for _ in arguments]
    if rng.random() < 0.25:  # a name that says nothing: it can only be copied from the list
        name = random_word(rng).lower() + rng.choice(("", "_" + noun, "_" + random_word(rng).lower()))
    capital = verb.capitalize()
    descriptions = (f"{capital} a {noun}", f"{capital} the {noun}", f"{capital} the {noun} of a {arguments[0]}")
    description = rng.choice(descriptions) if rng.random() < 0.8 or verb not in name else ""
    forms = ONE_VALUE_FORMS if count == 1 else TWO_VALUE_FORMS
    words = dict(zip(("a", "b"), arguments, strict=False)) | dict(zip(("v", "w"), values, strict=False))
    question = rng.choice(forms).format(verb=verb, Verb=verb.capitalize(), noun=noun, tool=name, **words)
    question = _with_tail(question, rng)
    return _tool(name, arguments, _longer(description, rng)), question, dict(zip(arguments, values, strict=True))


def expression_request(rng: random.Random) -> Request:
    name, description = rng.choice(EXPRESSION_TOOLS)
    numbers = [str(rng.randint(0, rng.choice((9, 99, 999)))) for _ in range(rng.choice((2, 2, 2, 3)))]
    expression = numbers[0] + "".join(f" {rng.choice('+-*/')} {number}" for number in numbers[1:])
    argument = rng.choice(("expression", "expression", "input", "formula", "query"))
    tool = _tool(name, (argument,), _longer(description, rng))
    return tool, rng.choice(EXPRESSION_FORMS).format(expression), {argument: expression}


def clock_request(rng: random.Random) -> Request:
    name = rng.choice(("get_time", "current_time", "clock"))
    return _tool(name, (), "Get the current time"), rng.choice(CLOCK_FORMS), {}


REQUESTS = (
    weather_request,
    weather_request,
    sum_request,
    expression_request,
    generic_request,
    generic_request,
    generic_request,
    generic_request,
    clock_request,
)


def random_result(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.3:
        return f"{rng.randint(-20, 99)} degrees and {rng.choice(('sunny', 'rainy', 'cloudy', 'windy', 'snow'))}"
    if shape < 0.5:
        keys = rng.sample(("temperature", "status", "result", "value", "unit", "condition", "name", "count"), 2)
        return json.dumps({keys[0]: rng.randint(0, 999), keys[1]: random_word(rng)})
    if shape < 0.65:
        return str(rng.randint(0, 99999))
    return " ".join(random_value(rng) for _ in range(rng.randint(1, 4)))


def tool_sample(rng: random.Random, plain) -> tuple[str, list[dict], list[dict], str]:
    """(kind, messages, tools, effort). `plain` is a turn to answer without a tool."""
    requests = _compatible([make(rng) for make in rng.sample(REQUESTS, rng.choice((1, 1, 2, 2, 3)))])
    requests = list({request[0]["function"]["name"]: request for request in requests}.values())
    tools = [tool for tool, _, _ in requests]
    effort = rng.choices(("low", "high", "max"), (0.75, 0.17, 0.08))[0]
    shape = rng.random()
    if shape < 0.2 and not (plain.kind == "sum" and _has_sum_tool(tools)):
        answer = _with_thought({"role": "assistant", "content": plain.answer}, plain.thought, effort)
        return "tool_unused", [{"role": "user", "content": plain.question}, answer], tools, effort
    tool, question, arguments = rng.choice(requests)
    name = tool["function"]["name"]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    messages = [{"role": "user", "content": question}, _with_thought(call, f"I call {name}.", effort)]
    if shape < 0.7:
        return "tool_call", messages, tools, effort
    result = random_result(rng)
    answer = _with_thought({"role": "assistant", "content": f"The tool says: {result}"}, "I have the result.", effort)
    return "tool_result", [*messages, {"role": "tool", "content": result}, answer], tools, effort


def _compatible(requests: list[Request]) -> list[Request]:
    """One tool at most for sums: with two, which one to call would be a matter of taste."""
    sums = [r for r in requests if _has_sum_tool([r[0]])]
    return [r for r in requests if r not in sums[1:]]


def _has_sum_tool(tools: list[dict]) -> bool:
    names = [tool["function"]["name"] for tool in tools]
    marks = [verb for verb, _, _ in SUM_TOOLS] + [name for name, _ in EXPRESSION_TOOLS]
    return any(mark in name for name in names for mark in marks)


def _with_thought(message: dict, thought: str, effort: str) -> dict:
    return message if effort == "low" else message | {"reasoning_content": thought}
