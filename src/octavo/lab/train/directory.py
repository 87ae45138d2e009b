"""The directory of a run: a lock for one writer, and protection of existing runs and foreign files."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path

from octavo._util.config_reader import read_file
from octavo._util.files import os_errors
from octavo.errors import CheckpointError, ConfigError, RunError
from octavo.lab.train import checkpoint

LOCK = ".lock"


class RunDirectory:
    """The only writer of a run's directory, as context manager.

    The lock is an `flock`, which ends with its process, however that ends: a file that is left over locks nothing.

    Raises:
        RunError: another process writes to the directory, or it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path / LOCK
        self._descriptor = -1

    def __enter__(self) -> RunDirectory:
        with os_errors(self.path, RunError):
            self._acquire()
        return self

    def _acquire(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        while not self.is_there():  # its last holder may have removed the file in between
            self._release()
            self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._refusal() from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                warnings.warn(
                    f"{self.path}: its file system has no locks ({error.strerror}). Let no other run write here.",
                    stacklevel=4,
                )
        os.ftruncate(self._descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _refusal(self) -> RunError:
        text = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
        holder = "".join(c if c.isprintable() else "?" for c in text) or "another process"
        self._release()
        return RunError(f"{self.path}: {holder} is writing a run here. Wait, stop it, or name another --out.")

    def is_there(self) -> bool:
        """Return False once the directory or its lock file has been removed or renamed."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(self._lock.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def __exit__(self, *_: object) -> None:
        if self.is_there():
            self._lock.unlink()
            with suppress(OSError):  # nothing was written
                self.path.rmdir()
        self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def check_directory(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Check, before any work, that nothing is overwritten by accident and that there is a checkpoint to resume from.

    Raises:
        ConfigError: the directory contains a run, or files of something else.
        CheckpointError: there is no checkpoint to resume from.
    """
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite starts it over: choose one.")
    last, config, store = checkpoint.latest(out / "checkpoints"), out / "config.json", out / "run.sqlite"
    foreign = config if config.exists() and not _is_of_run(config) else store
    if foreign is config or (store.exists() and not config.exists()):
        raise ConfigError(f"{foreign}: is not of a run of octavo train, and would be overwritten. Name another --out.")
    if resume and last is None:
        raise CheckpointError(f"{out / 'checkpoints'}: there is no checkpoint to resume from. Start without --resume.")
    if resume or overwrite:
        return
    if last is not None:
        raise ConfigError(
            f"{out}: already contains a run ({last.name}). --resume continues it, --overwrite starts over,"
            " --out names another directory."
        )
    if (log := out / "metrics.jsonl").exists() and log.stat().st_size:
        raise ConfigError(
            f"{out}: already contains a run without a checkpoint, whose {log.name} would be lost. --overwrite starts"
            " over, --out names another directory."
        )


def _is_of_run(config: Path) -> bool:
    try:
        content = read_file(config)
    except ConfigError:
        return False
    return {"model", "data", "run"} <= content.keys()


def rescue_path(out: Path) -> Path:
    """Return an unused path next to a directory that is gone."""
    names = (out.with_name(f"{out.name}-rescued{number or ''}") for number in range(1000))
    return next(path for path in names if not path.exists())
