"""Where a tenant's records lie: below a folder of its own, in shards that say by their names whose they are.

The folder is the tenant's name, with every character but letters, digits, `-`, `_`, `.` and `~` as `=` and two hex
digits a byte of UTF-8; of a long name its beginning and its digest. The tenant "" has the store's root.
"""

from __future__ import annotations

import hashlib
import urllib.parse

TENANTS = "tenants"
_SEPARATOR = "_"  # which is in no `new_name`
_MAX_LENGTH = 100  # characters: file names have 255, of which a shard's time, and what is appended to it, take 80


def tenant_folder(tenant: str) -> str:
    """The name of the tenant's folder below `TENANTS`; "" for the tenant "". No two tenants have the same."""
    quoted = urllib.parse.quote(tenant, safe="").replace("%", "=")
    if quoted.startswith("."):  # "..", and what listings leave out
        quoted = f"=2E{quoted[1:]}"
    if len(quoted) <= _MAX_LENGTH:
        return quoted
    # "==" stands in no name that is not cut.
    return f"{quoted[: _MAX_LENGTH - 34]}=={hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def shard_name(folder: str, name: str) -> str:
    """The id of a shard of the tenant whose folder it is."""
    return f"{folder}{_SEPARATOR}{name}" if folder else name


def folder_of(shard_id: str) -> str:
    """The folder of the tenant whose shard it is."""
    return shard_id.rpartition(_SEPARATOR)[0]
