"""vLLM workers that fail where a test wants it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from rollout_spec_verl.cpu.worker_extension import WorkerExtension


class Counting(WorkerExtension):
    """Counts weight updates; verl's first one comes before anything is generated."""

    planted_updates = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self.planted_updates += 1
        super().update_weights_from_ipc(*args, **kwargs)


class KilledExtension(Counting):
    """Its process, which is the engine's, is killed in the generation after the fourth update."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        if self.planted_updates == 4:
            threading.Thread(target=self.planted_end, daemon=True).start()

    def planted_end(self) -> None:
        while not self.model_runner.input_batch.num_reqs:
            time.sleep(0.001)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)


class FailingExtension(Counting):
    """It fails in the third update."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        if self.planted_updates == 2:
            raise RuntimeError("a planted failure")
        super().update_weights_from_ipc(*args, **kwargs)
