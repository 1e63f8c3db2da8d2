"""Health of a container, for the Dockerfile: ill when distclip's endpoint is there and does not answer well.

A container without an endpoint (nothing trains in it, or without distclip's plug-in) is not ill. Ends with code 0 or 1.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

_TIMEOUT_SECONDS = 3.0


def healthy(port: str) -> bool:
    """Whether /healthz on this machine's `port` answers, or nothing listens there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=_TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return False
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except OSError:  # it listens, and then breaks off or says nothing
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(os.environ.get("DISTCLIP_PORT") or "9519") else 1)
