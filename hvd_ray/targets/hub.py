"""Models of the Hugging Face hub, through its own cache: data only, no pickles, no code."""

import os
import re
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.home import writes_into
from hvd_ray.targets.identity import check_model_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_DATA_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form ORG/NAME."""
    return _HUB_ID.fullmatch(name) is not None


def is_offline() -> bool:
    """Whether the user forbids the network (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def cached_folder(hub_id: str) -> Path | None:
    """The model's folder in the hub's cache, or None if it is not wholly there.

    Raises:
        UserError: it is not, and the network may not be used to fetch it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        check_model_folder(folder)
    except (LocalEntryNotFoundError, UserError) as error:
        if not is_offline():
            return None
        reason = f" ({error})" if isinstance(error, UserError) else ""
        raise UserError(
            f"model {hub_id!r} is neither a folder here nor in the hub's cache{reason}, and "
            f"HF_HUB_OFFLINE is set; unset it and run: hvd fetch {hub_id}"
        ) from None
    return folder


def fetch_from_hub(hub_id: str, *, force: bool) -> Path:
    """Bring the model into the hub's cache; the hub's own client resumes and locks.

    Raises:
        UserError: no such model, no access, no network, no room, or no loadable model in it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        with writes_into(Path(HF_HUB_CACHE)):
            patterns = list(_DATA_FILES)
            folder = snapshot_download(hub_id, allow_patterns=patterns, force_download=force)
    except (HfHubHTTPError, EntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot fetch {hub_id} from the hub: {reason}") from None
    check_model_folder(Path(folder))
    return Path(folder)
