"""Is there a network? Asked once, since the hub's own client tries for 23 to 48 s before it gives up."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import constants


def hub_reachable(timeout_s: float = 3.0) -> bool:
    """Whether the hub, or the proxy before it, accepts a connection within `timeout_s`."""
    if constants.is_offline_mode():
        return False
    proxy = getproxies().get("https")
    address = urlparse(proxy or constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    answers: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((address.hostname or "", port), timeout=timeout_s).close()
            answers.append(True)
        except OSError:
            answers.append(False)

    # In a thread: a name server that does not answer ignores the socket's timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    return bool(answers) and answers[0]
