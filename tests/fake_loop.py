"""A clock, a GPU and a profiler with which tests measure a training loop."""

from __future__ import annotations

from pytest_aisp.training_loop.loop import BODY, Event, Instruments, TorchProfile


class FakeMachine(Instruments):
    """A clock that advances by `tick` when it is read, a GPU with a queue, a fake profiler."""

    def __init__(self, gpu=False, tick=0.0):
        self.now, self.queue, self.tick, self.calls, self.gpu = 0.0, 0.0, tick, [], gpu
        self.recorded = [Event("kernel", 0.0, 3.0, on_gpu=True), Event(BODY, 0.0, 4.0)]

    def clock(self):
        self.now += self.tick
        return self.now

    def synchronize(self):
        self.now, self.queue = self.now + self.queue, 0.0

    def profile(self):
        return self if self.gpu else "no GPU is used"

    def begin_step(self):
        self.calls.append("begin")

    def end_step(self):
        self.calls.append("end")

    def stop(self):
        self.calls.append("stop")

    def events(self):
        return self.recorded


class CpuProfile(FakeMachine):
    """Profiles the CPU with torch.profiler."""

    def profile(self):
        return TorchProfile(gpu=False)
