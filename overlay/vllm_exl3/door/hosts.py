"""Where a request without a key comes from: refuses web pages of others, by `Origin`, and names that were turned onto
this machine (DNS rebinding), by `Host`."""

import ipaddress
import socket
from urllib.parse import urlsplit

from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.keys import Headers


def machine_names() -> tuple[str, ...]:
    """What the network may rightly call this machine. An address needs no name: a page cannot turn it."""
    name = socket.gethostname().lower()
    return ("localhost", name, f"{name.partition('.')[0]}.local")


def values_of(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port and brackets; empty where there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_strange(headers: Headers, known_hosts: tuple[str, ...], origins: tuple[str, ...]) -> None:
    """Raises Refusal. For servers without a key: with one, a page or a turned name does not know it."""
    hosts = values_of(headers, b"host")
    name = host_name(hosts[0]) if len(hosts) == 1 else ""
    if not (is_address(name) or name in known_hosts):
        raise Refusal(
            403, "host_not_allowed",
            f"Host: {hosts[0][:100] if hosts else 'none'} is not a name of this machine; ask by its address, or add "
            f"the name to ALLOWED_HOSTS, or set VLLM_API_KEY.",
        )  # fmt: skip
    for origin in values_of(headers, b"origin"):
        if origin not in origins and origin.lower() not in (f"http://{hosts[0]}".lower(), f"https://{hosts[0]}".lower()):
            raise Refusal(
                403, "origin_not_allowed",
                f"Origin: web pages of {origin[:100]} may not use this server; add it to CORS_ORIGINS if they may.",
            )  # fmt: skip
