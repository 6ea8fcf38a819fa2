"""Follow a run in TensorBoard (extra `fedbuff[tensorboard]`); steps are client trips."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbuff import toml
from fedbuff.report.files import FolderError
from fedbuff.report.scalars import scalars

if TYPE_CHECKING:
    from fedbuff.sim.simulation import Status


@contextmanager
def tensorboard(folder: Path) -> "Iterator[Callable[[Status], None]]":
    """Write evaluations and settings into `folder`; a function to report the run's `Status` to.

    A resumed run writes its evaluations again from the start, and tells TensorBoard to forget those it had.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as e:
        raise ValueError("--tensorboard needs TensorBoard: pip install 'fedbuff[tensorboard]'") from e
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=2)  # which writes in a thread of its own
    except OSError as e:
        raise FolderError(f"can't write to {folder}: {e.strerror or e}; choose another --tensorboard") from e

    def write(step: int, *values: Any) -> None:
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def begin(settings: toml.Table) -> None:
        """Forget what an earlier sitting wrote, and show the settings as text."""
        text = TensorProto(
            dtype=DT_STRING,
            string_val=[f"```toml\n{toml.dumps(settings)}```".encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        writer.add_event(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        write(0, Summary.Value(tag="settings", tensor=text, metadata=about))

    written = 0

    def report(status: "Status") -> None:
        nonlocal written
        if len(status.metrics) == written:
            return
        if written == 0:
            begin(status.settings)
        for trips, values in scalars(status.metrics, written):
            write(trips, *(Summary.Value(tag=name, simple_value=value) for name, value in values.items()))
        if status.staleness is not None:
            write(status.trips, Summary.Value(tag="run/staleness_mean", simple_value=status.staleness))
        written = len(status.metrics)

    try:
        yield report
    finally:
        writer.close()
