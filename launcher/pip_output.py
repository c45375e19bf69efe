"""Why pip or venv failed, in our words; its own are for a log. Standard library and Python 3.8, for the bootstrap."""

import re

# The first that is found counts: without a network pip ends with the same words as for a package that does not exist.
REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    (r"ensurepip", "Python's venv module is not complete; on Debian or Ubuntu: sudo apt-get install python3-venv"),
    (r"DO NOT MATCH THE HASHES", "a package is not the one that the lock names: an index or a proxy changes it"),
    (r"certificate verify failed|CERTIFICATE_VERIFY", "the package index shows a certificate that is not trusted"),
    (r"ProxyError|Tunnel connection failed|Cannot connect to proxy", "the proxy does not lead to the package index"),
    (r"Retrying \(|NewConnectionError|ConnectTimeout|Max retries exceeded|timed out|Failed to establish",
     "the package index cannot be reached; look at the network, or at PIP_INDEX_URL"),
    (r"(?:401|403|407) (?:Client )?Error|HTTP error 40[137]", "the package index refuses this user"),
    (r"No matching distribution found for ([^\s;]+)", r"the package index has no \1 for this Python and machine"),
    (r"Permission denied", "a folder may not be written"),
)  # fmt: skip
UNKNOWN = "pip does not say why in words that are known here"


def reason(text):
    for pattern, sentence in REASONS:
        found = re.search(pattern, text)
        if found:
            return found.expand(sentence)
    return UNKNOWN
