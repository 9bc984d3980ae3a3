"""Who is calling: API keys, each with the name of a tenant.

Without keys the front serves this machine alone, and a browser page of somebody else's cannot call
it: requests must come from loopback and be addressed to it.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.serving.api_error import ApiError

VARIABLE = "HVD_API_KEYS"
LOCAL_TENANT = "local"
MIN_KEY_CHARS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys and the tenants they belong to; none: loopback only."""

    tenant_of: tuple[tuple[bytes, str], ...] = ()

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.tenant_of)} keys)"

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self.tenant_of

    def tenant(self, *, authorization: str | None, peer: str | None, host: str | None) -> str:
        """Whose request this is.

        Args:
            authorization: the header `Bearer KEY`.
            peer: the address that the connection comes from.
            host: the header `Host`.

        Raises:
            ApiError: 401, there is no valid key, or none is set and the caller is elsewhere.
        """
        if self.is_open:
            if _is_loopback(peer) and _names_loopback(host):
                return LOCAL_TENANT
            message = "no API keys are set, so only requests from this machine are served"
            raise ApiError(401, message, code="invalid_api_key")
        scheme, _, given = (authorization or "").partition(" ")
        found = self._find(given.strip().encode()) if scheme.lower() == "bearer" else None
        if found is None:
            raise ApiError(401, "missing or wrong API key: send `Authorization: Bearer KEY`",
                           code="invalid_api_key")  # fmt: skip
        return found

    def _find(self, given: bytes) -> str | None:
        """Compares with every key in constant time, whichever fits."""
        found = None
        for key, tenant in self.tenant_of:
            if hmac.compare_digest(key, given):
                found = tenant
        return found


@dataclass(slots=True)
class KeyFile:
    """A file of keys that is read again when it has changed: a key taken out of it must not work
    until the next restart."""

    path: Path
    _seen: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._seen = self._stamp()

    def changed(self) -> ApiKeys | None:
        """The keys, if the file is another one than when it was last looked at.

        Raises:
            UserError: it cannot be read any more, or holds no keys; raised once for each change.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        return load_keys(self.path)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.expanduser().stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


def load_keys(path: Path | None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """The keys of a file, or of the variable HVD_API_KEYS, which holds lines of the same form.

    Each line is `NAME KEY`; several keys may have one name. `#` begins a comment.

    Raises:
        UserError: the file cannot be read, or a line has another form; never shows a key.
    """
    if path is not None:
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no UTF-8 text"
            raise UserError(f"API keys {path}: cannot be read ({reason})") from None
        keys = _parse(text, str(path))
        if not keys:
            raise UserError(f"API keys {path}: holds no key; expected lines of NAME KEY")
        return ApiKeys(keys)
    return ApiKeys(_parse(environment.get(VARIABLE, ""), VARIABLE))


def _parse(text: str, where: str) -> tuple[tuple[bytes, str], ...]:
    keys: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]):
            raise UserError(f"API keys {where}, line {number}: expected NAME KEY")
        name, key = words
        if len(key) < MIN_KEY_CHARS:
            raise UserError(
                f"API keys {where}, line {number}: the key of {name} is shorter than "
                f"{MIN_KEY_CHARS} characters; make one with `openssl rand -hex 24`"
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"API keys {where}, line {number}: the key of {name} has characters beyond ASCII, "
                "which no HTTP header carries alike; make one with `openssl rand -hex 24`"
            )
        if keys.setdefault(key.encode(), name) != name:
            raise UserError(f"API keys {where}, line {number}: {name} has another name's key")
    return tuple(keys.items())


def is_loopback_host(host: str) -> bool:
    """Whether an address to bind to can be reached from this machine only."""
    return host == "localhost" or _is_loopback(host)


def _is_loopback(address: str | None) -> bool:
    try:
        return ip_address((address or "").strip("[]")).is_loopback
    except ValueError:
        return False


def _names_loopback(host: str | None) -> bool:
    """Whether a Host header names this machine by its loopback, so that no foreign name does."""
    name = re.sub(r":\d+$", "", host or "")
    return is_loopback_host(name)
