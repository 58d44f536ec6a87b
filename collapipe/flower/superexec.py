"""``python -m collapipe.flower.superexec OPTIONS…`` runs Flower's SuperExec.

Flower's own starts the process of a run and forgets it. On a busy machine the process may import
libraries for more than 30 s. Flower then starts a second one, and a third, and each slows down the
others. They outlive the SuperLink while they import, and Flower
notices only after a minute that one was killed. Here a process keeps its task as long as it lives,
fails its task when it dies, and ends with the SuperExec.
"""

import signal
import subprocess
import threading
from contextlib import closing, suppress

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import PushTaskOutputRequest
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates

from collapipe.flower.runtime import beating, connect

_ENDED = "the process of the task has ended"


class OwningExecutor(SubprocessExecutor):
    """Starts processes of tasks, and knows each until it has ended."""

    def __init__(self) -> None:
        self._running = dict[subprocess.Popen[bytes], TaskType]()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task: Flower's command, without output."""
        command = [TASK_TYPE_TO_COMMAND[spec.task_type], "--token", spec.token]
        command += ["--runtime-api-address", spec.runtime_api_address]
        command += ["--parent-pid", str(spec.parent_pid)]
        command += ["--insecure"] if spec.insecure else []
        if spec.root_certificates_path is not None:
            command += ["--root-certificates", spec.root_certificates_path]
        silent = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=silent, stderr=silent)  # noqa: S603 - Flower's
        self._running[process] = spec.task_type
        threading.Thread(target=self._watch, args=(process, spec), daemon=True).start()
        return LaunchResult.accepted()

    def _watch(self, process: subprocess.Popen[bytes], spec: ExecutionSpec) -> None:
        """Send heartbeats of a task until its process ends, then report that the task has failed.
        The SuperLink refuses both after the process itself has reported an end."""
        certificates = validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        )
        client = connect(
            spec.runtime_api_address,
            "SuperExec",
            RuntimeTokenHttpInterceptor(spec.token),
            insecure=spec.insecure,
            root_certificates=certificates,
        )
        with closing(client):
            with beating(client):
                process.wait()
            del self._running[process]
            with suppress(httpx.HTTPError):
                failed = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=_ENDED)
                client.PushTaskOutput(failed)

    def close(self) -> None:
        """Ask all processes to end: one that still imports ends at once, another by Flower's own
        handler, which forces its end after 5 s."""
        for process, task_type in [*self._running.items()]:
            # Ray takes SIGTERM from Flower's handler.
            simulates = task_type == TaskType.SIMULATION
            process.send_signal(signal.SIGINT if simulates else signal.SIGTERM)


def main() -> None:
    """Run a SuperExec until a signal, or until the SuperLink has ended."""
    setattr(run_superexec, "get_executor", lambda *_, **__: OwningExecutor())  # noqa: B010 - a module
    flower_superexec()


if __name__ == "__main__":
    main()
