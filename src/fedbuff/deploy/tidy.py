"""What a finished run must not leave behind: with updates, or sums without noise, anybody could take its noise off again."""

from pathlib import Path

from fedbuff.deploy.settings import Deployment
from fedbuff.report.files import FolderError
from fedbuff.report.folder import forget_key
from fedbuff.settings import Settings


def tidy(settings: Settings, run: Path) -> None:
    """Delete the journal of a finished run, unless it is wanted; where noise is a secret, in any case, with key and checkpoint.

    To be called again after a kill: whoever finds summary.json may do it.
    """
    secret = settings.privacy is not None and settings.privacy.noise != "seeded"
    kept, journal = (settings.deploy or Deployment()).keep_journal and not secret, run / "journal"
    try:
        forget_key(run)
        for segment in [] if kept else journal.glob("*.journal"):
            segment.unlink(missing_ok=True)
    except OSError as e:
        raise FolderError(
            f"can't delete {e.filename}: {e.strerror}; do so yourself: it can take the noise off the model"
        ) from e
    if not kept and journal.is_dir() and not journal.is_symlink() and not any(journal.iterdir()):
        journal.rmdir()
