"""A host and a GPU that do not exist, recorded as PyTorch's profiler records real ones on CUDA.

Events have the names and fields that Kineto writes (`torch.profiler.profile(...).export_chrome_trace`): the categories `user_annotation`,
`cpu_op`, `cuda_runtime`, `cuda_driver`, `kernel`, `gpu_memcpy`, `gpu_user_annotation`, `ac2g` and `cpu_instant_event` (`[memory]`).
`External id` joins an operator with what it launched, `correlation` a launch with its kernel, `Sequence number` a forward operator with its
backward one. A kernel starts once it is launched, its stream is free, and what it waits for is done: gaps, waits and overlap follow from
that and from the times that are put in.

Backward passes are on autograd's own thread, as on CUDA. `random.Random.random` is the only source of randomness, and no function of libm
is used, so that the same bytes come out on every machine.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PID, MAIN, AUTOGRAD = 20417, 20417, 20533  # process, and two of its threads
COMPUTE, COPIES, NCCL = 7, 13, 21  # streams
START_US = 2048113905512.117
LATENCY_US = 3.1  # from a launch to its kernel, on a stream that is free
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
GEMM_BACK = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NTN"
AMPERE = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
    "const::{lambda()#12}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, "
    "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int, ...)"
)
BINARY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int, "
    "at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, "
    "float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4>)"
)
FLASH = (
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, false, true>"
    "(Flash_fwd_params)"
)
FLASH_BACK = "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2>>(Flash_bwd_params)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>>"
)
NORM_FUSED = "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0"
ROPE_FUSED = "triton_poi_fused_add_cat_mul_neg_1"
GLU_FUSED = "triton_poi_fused_mul_silu_0"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Event = dict[str, Any]


class Timeline:
    """Records what a host asks of its GPU, and when it happens."""

    def __init__(self, seed: int, card: dict[str, Any], op_us: float, rank: int = 0, ranks: int = 1) -> None:
        """`op_us`: what the host takes per operator in addition to its launches."""
        self.rng, self.card, self.op_us, self.rank, self.ranks = random.Random(seed), card, op_us, rank, ranks
        self.now, self.thread = START_US, MAIN
        self.free: dict[int, float] = {}  # stream -> when its last work ends
        self.events: list[Event] = []
        self.memory: list[Event] = []
        self.external = self.record = self.correlation = self.sequence = self.addresses = 0
        self._ops: list[int] = []  # External ids of the operators that are open
        self._gpu: list[dict[int, list[float]]] = []  # of the open ranges: stream -> start and end of what they launched
        self.allocated = 0

    def vary(self, mean: float, share: float = 0.08) -> float:
        """A number around a mean."""
        return mean * (1 + share * (self.rng.random() + self.rng.random() - 1))

    def python(self, us: float) -> None:
        """Let the host do something that is no operator."""
        self.now += us

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A range that `record_function` marks, also on the GPU's streams."""
        event = self._open("user_annotation", name, {})
        self._gpu.append({})
        yield
        self._close(event)
        for stream, (start, end) in sorted(self._gpu.pop().items()):
            args = {"External id": event["args"]["External id"]}
            self.events.append(_event("gpu_user_annotation", name, 0, stream, start, end - start, args))

    @contextmanager
    def op(self, name: str, forward: int | None = None, sequence: int | None = None) -> Iterator[int]:
        """An operator. `sequence`: that of its forward operator, in a backward pass; a new one otherwise."""
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        self.now += self.vary(self.op_us * 0.25)
        event = self._open("cpu_op", name, {"Sequence number": sequence, "Fwd thread id": forward or 0})
        self._ops.append(event["args"]["External id"])
        self.now += self.vary(self.op_us * 0.45)
        yield sequence
        self.now += self.vary(self.op_us * 0.3)
        self._ops.pop()
        self._close(event)

    def launch(self, kernel: str, us: float, stream: int = COMPUTE, after: Sequence[float] = (), **more: Any) -> float:
        """Launch a kernel; when it ends. `after`: moments that its stream waits for (`cudaStreamWaitEvent`)."""
        driver = kernel.startswith(("triton", "nvjet"))
        api, cat, cbid = ("cuLaunchKernelEx", "cuda_driver", 652) if driver else ("cudaLaunchKernel", "cuda_runtime", 211)
        number = self._call(cat, api, cbid, self.vary(4.4))
        start = max(self.now - 0.6 + self.vary(LATENCY_US, 0.2), self.free.get(stream, 0.0) + self.vary(1.1, 0.3), *after)
        blocks = 132 * (1 + int(us / 9))
        args = {
            "queued": 0,
            "device": self.rank,
            "context": 1,
            "stream": stream,
            "correlation": number,
            "registers per thread": 168 if us > 60 else 32,
            "shared memory": 213_016 if us > 60 else 0,
            "blocks per SM": blocks / 132,
            "warps per SM": blocks * 4 / 132,
            "grid": [blocks, 1, 1],
            "block": [128, 1, 1],
            "est. achieved occupancy %": 19 if us > 60 else 88,
            **more,
        }
        return self._on_gpu("kernel", kernel, number, stream, start, self.vary(us, 0.05), args)

    def copy(self, how: str, size: int, us: float, stream: int = COMPUTE) -> float:
        """Copy between host and GPU, such as `HtoD (Pinned -> Device)`; when it ends."""
        number = self._call("cuda_runtime", "cudaMemcpyAsync", 41, self.vary(6.2))
        start = max(self.now - 0.6 + self.vary(LATENCY_US, 0.2), self.free.get(stream, 0.0) + 1.0)
        args = {"device": self.rank, "context": 1, "stream": stream, "correlation": number, "bytes": size}
        return self._on_gpu("gpu_memcpy", f"Memcpy {how}", number, stream, start, us, args | {"memory bandwidth (GB/s)": size / us / 1000})

    def wait(self, api: str = "cudaStreamSynchronize", stream: int = COMPUTE) -> None:
        """Have the host wait until a stream is done."""
        self._call("cuda_runtime", api, 131, max(self.free.get(stream, 0.0) - self.now, 0.0) + self.vary(5.2))

    def allocate(self, size: int) -> int:
        """Memory of the caching allocator; its address."""
        self.addresses += 1
        self._memory(size, address := 139_850_000_000_000 + self.addresses * 2_097_152)
        return address

    def release(self, size: int, address: int) -> None:
        self._memory(-size, address)

    def trace(self, name: str) -> dict[str, Any]:
        """The whole file, as `export_chrome_trace` writes it."""
        out: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": self.rank, **self.card}]}
        out |= {"cupti_version": 26, "cuda_runtime_version": 12080, "cuda_driver_version": 12080}
        if self.ranks > 1:
            out["distributedInfo"] = {
                "backend": "nccl",
                "rank": self.rank,
                "world_size": self.ranks,
                "pg_count": 1,
                "nccl_version": "2.27.5",
            }
        out |= {"trace_id": "4C1D0F6B8E0A4F27A1C64A6E5B0F9D21", "profile_memory": 1, "displayTimeUnit": "ms"}
        out["baseTimeNanoseconds"] = 1790857026000000000
        start, end = START_US - 92.4, max(self.now, *self.free.values())
        spans = _event("Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", start, end - start, {"Op count": 0})  # type: ignore[arg-type]
        out["traceEvents"] = [*self._names(), *self.events, *self.memory, spans]
        return out | {"traceName": name}

    def _open(self, cat: str, name: str, args: dict[str, Any]) -> Event:
        self.external += 1
        event = _event(cat, name, PID, self.thread, self.now, 0.0, {"External id": self.external, "Record function id": 0, **args})
        event["args"]["Ev Idx"] = len(self.events)
        self.events.append(event)
        return event

    def _close(self, event: Event) -> None:
        event["dur"] = round(self.now - event["ts"], 3)

    def _call(self, cat: str, api: str, cbid: int, us: float) -> int:
        """A call of the runtime or the driver; its correlation."""
        self.correlation += 1
        args = {"cbid": cbid, "correlation": self.correlation}
        self.events.append(_event(cat, api, PID, self.thread, self.now, us, {"External id": self._ops[-1] if self._ops else 0, **args}))
        self.now += us
        return self.correlation

    def _on_gpu(self, cat: str, name: str, number: int, stream: int, start: float, us: float, args: dict[str, Any]) -> float:
        asked = self.events[-1]
        end = self.free[stream] = start + us
        self.events.append(_event(cat, name, 0, stream, start, us, {"External id": self._ops[-1] if self._ops else 0, **args}))
        for ph, pid, tid, ts in (("s", PID, self.thread, asked["ts"]), ("f", 0, stream, start)):
            flow = {"ph": ph, "id": number, "pid": pid, "tid": tid, "ts": round(ts, 3), "cat": "ac2g", "name": "ac2g"}
            self.events.append(flow | ({"bp": "e"} if ph == "f" else {}))
        for spans in self._gpu if self.thread == MAIN else ():
            span = spans.setdefault(stream, [start, end])
            span[:] = min(span[0], start), max(span[1], end)
        return end

    def _memory(self, change: int, address: int) -> None:
        self.allocated += change
        args = {"Total Reserved": 1 << 34, "Total Allocated": (9 << 30) + self.allocated, "Bytes": change, "Device Id": 0, "Device Type": 1}
        event = {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": PID,
            "tid": self.thread,
            "ts": round(self.now, 3),
        }
        self.memory.append(event | {"args": {**args, "Addr": address, "finished": False, "Ev Idx": len(self.events)}})

    def _names(self) -> list[Event]:
        rows = [("process_name", PID, 0, {"name": "python"}), ("process_labels", PID, 0, {"labels": "CPU"})]
        rows += [("process_name", 0, 0, {"name": "python"}), ("process_labels", 0, 0, {"labels": f"GPU {self.rank}"})]
        rows += [("thread_name", 0, stream, {"name": f"stream {stream} "}) for stream in sorted(self.free)]
        rows += [("thread_name", PID, MAIN, {"name": f"thread {MAIN} (eyeline)"})]
        rows += [("thread_name", PID, AUTOGRAD, {"name": f"thread {AUTOGRAD} (pt_autograd_0)"})]
        return [{"ph": "M", "name": name, "ts": START_US, "pid": pid, "tid": tid, "args": args} for name, pid, tid, args in rows]


def _event(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3), "dur": round(dur, 3), "args": args}
