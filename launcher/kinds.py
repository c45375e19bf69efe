"""The types of settings: how text becomes a value, and a value text again.

Values are plain data, so that they can be compared, printed and recorded: str, int, float, bool, None, tuple of str.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
WHOLE_NUMBER = re.compile(r"[0-9]{1,15}")
DECIMAL_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?|\.[0-9]{1,15}")
SHELL_EXPANSION = re.compile(r"`|\$[({A-Za-z_]")
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

# Linux takes 4095 bytes, and something comes below every folder.
LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 3_500


@dataclass(frozen=True)
class Kind:
    """`parse` raises ValueError; its words, if any, say more than `needs` does."""

    word: str  # for the reference page
    needs: str  # for messages: what is needed, as an object
    parse: Callable[[str], object]
    nothing: object = None  # the value of an empty text, where the setting may be empty


def matching(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern, re.ASCII)

    def parse(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError
        return text

    return parse


def parse_whole_number(text: str) -> int:
    return int(matching(WHOLE_NUMBER.pattern)(text))


def parse_number(text: str) -> float:
    return float(matching(DECIMAL_NUMBER.pattern)(text))


def parse_switch(text: str) -> bool:
    if text.lower() not in SWITCH_WORDS:
        raise ValueError
    return SWITCH_WORDS[text.lower()]


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise ValueError from None  # the library's words say less than `needs`


def parse_node_address(text: str) -> str:
    address = address_of(text)
    if address.version == 6:
        raise ValueError("is an IPv6 address; the links between the nodes are used by their IPv4 addresses")
    if address.is_loopback:
        raise ValueError("is a loopback address, which no other node can reach")
    if address.is_unspecified or address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        raise ValueError("is not the address of one machine")
    return str(address)


def parse_bind_address(text: str) -> str:
    address = address_of(text)
    if address.is_multicast:
        raise ValueError("is a multicast address; nothing can listen there")
    return str(address)


def parse_path(text: str) -> str:
    if CONTROL_CHARACTERS.search(text):
        raise ValueError("holds a line break or another control character")
    longest = max(len(name.encode("utf-8", "replace")) for name in text.split("/"))
    if longest > LONGEST_NAME_BYTES or len(text.encode("utf-8", "replace")) > LONGEST_PATH_BYTES:
        raise ValueError(
            f"is too long for a path: {LONGEST_NAME_BYTES} bytes fit between two /, and {LONGEST_PATH_BYTES} in all"
        )
    if text.startswith("~") and text != "~" and not text.startswith("~/"):
        raise ValueError("names another user's home folder; write the whole path")
    return text


def parse_node_path(text: str) -> str:
    parse_path(text)
    if not text.startswith(("/", "~")):
        raise ValueError
    return text


def parse_words(text: str) -> tuple[str, ...]:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"cannot be split into words by shell rules: {str(error).lower()}") from None


def parse_list(pattern: str) -> Callable[[str], tuple[str, ...]]:
    one = matching(pattern)

    def parse(text: str) -> tuple[str, ...]:
        items = [one(item.strip()) for item in text.split(",") if item.strip()]
        if len(set(items)) < len(items):
            raise ValueError("names something twice")
        return tuple(items)

    return parse


def parse_guards(text: str) -> tuple[str, ...]:
    names = parse_list(r"\S+")(text)
    if unknown := [name for name in names if name not in GUARDS]:
        raise ValueError(f"names {unknown[0]!r}, which is no guard")
    return names


# The plugin's, as overlay/vllm_exl3/guards has them.
GUARDS = ("chunk-ends", "block-sizes", "topk-ids", "decode-rows", "state-blocks")

CHOICE = Kind("choice", "one of the choices", matching(r"\S+"))
SECRET = Kind("secret", "printable characters without spaces", matching(r"[!-~]+"), "")
INTEGER = Kind("whole number", "a whole number", parse_whole_number)
NUMBER = Kind("number", "a number", parse_number)
SWITCH = Kind("switch", "1 or 0", parse_switch)
NODE_ADDRESS = Kind("IPv4 address", "an IPv4 address such as 192.168.100.10", parse_node_address, "")
BIND_ADDRESS = Kind("IP address", "an IP address of this machine, or 0.0.0.0 for all", parse_bind_address, "")
NODE_PATH = Kind("path", "a whole path, or one from ~/ on", parse_node_path, "")
HERE_PATH = Kind("path here", "a path on this machine; what is not whole begins at the checkout", parse_path, "")
WORDS = Kind("words", "words by shell rules", parse_words, ())
USER = Kind("user name", "a user name", matching(r"[A-Za-z_][A-Za-z0-9_.-]*"), "")
PREFIX = Kind("name", "letters, digits and . _ -, a letter or digit first", matching(r"[A-Za-z0-9][A-Za-z0-9_.-]*"))
IMAGE = Kind("image", "an image such as name:tag or name@sha256:...", matching(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*"))
INTERFACE = Kind(
    "interface", "one network interface such as enp1s0f0np0", matching(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*"), ""
)
DEVICES = Kind(
    "list of devices", "RDMA devices separated by commas, such as rocep1s0f0,roceP2p1s0f0",
    parse_list(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[0-9]+)?"), (),
)  # fmt: skip
CHECK_NAMES = Kind(
    "list of checks",
    "names of checks separated by commas, such as gpu-clocks",
    parse_list(r"[a-z0-9]+(-[a-z0-9]+)*"),
    (),
)
GUARD_NAMES = Kind("list of guards", "some of " + ", ".join(GUARDS) + ", with commas between", parse_guards, ())
ORIGINS = Kind(
    "list of origins", "origins of web pages such as https://chat.example:3000, separated by commas",
    parse_list(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+|null"), (),
)  # fmt: skip
HOST_NAMES = Kind("list of names", "host names separated by commas", parse_list(r"[A-Za-z0-9]([A-Za-z0-9.-]*)"), ())
LOWER_WORD = Kind("word", "one word", lambda text: matching(r"[A-Za-z0-9_-]+")(text).lower(), "")

# Kinds that can hold whatever is written; elsewhere a shell expansion is a mistake that deserves a word of its own.
FREE_FORM = (SECRET, WORDS)


def to_text(value: object) -> str:
    """Text that parses to this value again."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value)


def text_of(kind: Kind, value: object) -> str:
    if isinstance(value, tuple):
        return shlex.join(value) if kind is WORDS else ",".join(value)
    return to_text(value)
