"""FP8 convolutions of cuDNN (Hopper) beside BF16 ones: three directions, plans of the heuristics and all of engine 2.

    python benchmarks/convolutions.py [path of the nvidia_cudnn_frontend wheel]

Prints JSON lines, ends within about 95 s. Workers build plans at the same time (NVRTC takes seconds for one), and take a
lock to time them. Layouts that cuDNN 9.19 has plans for on Hopper: fprop reads NHWC images and KRSC weights; dgrad reads
NHWC gradients and weights with K innermost; wgrad reads images and gradients with N innermost.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import zipfile
from functools import partial

LIMIT = 88.0  # s, from the start of the parent
SWEEP = (17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 45, 46, 47, 48)  # KERNEL_CFG that engine 2 takes on Hopper
SHAPES = {  # images, channels, pixels, channels out, kernel, stride, groups
    "resnet50 3x3 128": (256, 128, 28, 128, 3, 1, 1),
    "resnet50 3x3 256": (256, 256, 14, 256, 3, 1, 1),
    "resnet50 3x3 512": (256, 512, 7, 512, 3, 1, 1),
    "unet 3x3 320": (32, 320, 64, 320, 3, 1, 1),
    "unet 3x3 640": (32, 640, 32, 640, 3, 1, 1),
    "unet 3x3 1280": (32, 1280, 16, 1280, 3, 1, 1),
    "convnext 2x2/2 256-512": (128, 256, 28, 512, 2, 2, 1),
    "convnext 1x1 512-2048": (128, 512, 14, 2048, 1, 1, 1),
    "convnext 7x7 512 depthwise": (128, 512, 14, 512, 7, 1, 512),
    "large 3x3 512": (64, 512, 28, 512, 3, 1, 1),
    "resnet50 7x7/2 stem": (256, 3, 224, 64, 7, 2, 1),
}
START = float(os.environ.setdefault("CONVOLUTIONS_START", str(time.time())))


def say(**row):
    """Print a JSON line at once, from any process."""
    os.write(1, (json.dumps(row) + "\n").encode())


def left():
    """Return the seconds left."""
    return LIMIT - (time.time() - START)


def short(error):
    """Return the end of an error in one line."""
    return " ".join(str(error).split())[-160:]


def find_frontend(wheel):
    """Import cuDNN's frontend, or unpack its wheel if it is not installed."""
    try:
        import cudnn
    except ImportError:
        target = tempfile.mkdtemp(prefix="cudnn-frontend-")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        sys.path.insert(0, target)
        import cudnn
    return cudnn


def strides(dims, innermost):
    """Return the strides of a 4D tensor whose channels, or first dimension, are innermost."""
    a, b, y, x = dims
    return [b * y * x, 1, b * x, b] if innermost == "c" else [1, a * y * x, a * x, a]


class Case:
    """Operands of one shape and direction, in BF16 and as codes with a scale per tensor."""

    def __init__(self, name, direction, torch):
        self.torch, self.name, self.direction = torch, name, direction
        n, c, h, k, r, s, groups = SHAPES[name]
        self.groups, self.stride, self.pad = groups, [s] * 2, [r // 2 if r % 2 else 0] * 2
        p = (h + 2 * self.pad[0] - r) // s + 1
        self.flops = 2 * n * p * p * k * (c // groups) * r * r
        gen = torch.Generator("cuda").manual_seed(0)

        def normal(*dims, scale=1.0):
            return (
                (torch.randn(dims, device="cuda", generator=gen) * scale)
                .bfloat16()
                .to(memory_format=torch.channels_last)
            )

        self.x, self.w, self.dy = normal(n, c, h, h), normal(k, c // groups, r, r, scale=0.05), normal(n, k, p, p)
        self.a, self.b, self.out = {
            "fprop": (self.x, self.w, self.dy),
            "dgrad": (self.dy, self.w, self.x),
            "wgrad": (self.x, self.dy, self.w),
        }[direction]
        self.layouts = {"fprop": "cc", "dgrad": "cn", "wgrad": "nn"}[direction]
        (self.qa, self.sa), (self.qb, self.sb) = (
            self.codes(self.a, self.layouts[0]),
            self.codes(self.b, self.layouts[1]),
        )
        self.y = torch.empty_like(self.out, memory_format=torch.channels_last)

    def codes(self, t, innermost):
        """Codes in the memory order that cuDNN asks for, and their scale."""
        torch = self.torch
        scale = t.abs().amax().float() / 448
        q = (t.float() / scale).to(torch.float8_e4m3fn)
        order = (0, 2, 3, 1) if innermost == "c" else (1, 2, 3, 0)
        return q.view(torch.uint8).permute(order).contiguous(), scale.reshape(1)

    def bf16(self, dtype=None):
        """The same product by PyTorch, of any dtype."""
        torch = self.torch
        x, w, dy = ((t if dtype is None else t.to(dtype)) for t in (self.x, self.w, self.dy))
        if self.direction == "fprop":
            return torch.conv2d(x, w, None, self.stride, self.pad, 1, self.groups)
        mask = (self.direction == "dgrad", self.direction == "wgrad", False)
        grads = torch.ops.aten.convolution_backward(
            dy, x, w, None, self.stride, self.pad, [1, 1], False, [0, 0], self.groups, mask
        )
        return grads[0] if mask[0] else grads[1]

    def exact(self):
        """FP32 result of the dequantised operands."""
        torch = self.torch
        order = {"c": (0, 3, 1, 2), "n": (3, 0, 1, 2)}
        a, b = (
            q.view(torch.float8_e4m3fn).float().permute(order[o]) * s
            for q, s, o in ((self.qa, self.sa, self.layouts[0]), (self.qb, self.sb, self.layouts[1]))
        )
        keep = self.x, self.w, self.dy
        if self.direction == "fprop":
            self.x, self.w = a, b
        elif self.direction == "dgrad":
            self.dy, self.w, self.x = a, b, self.x.float()
        else:
            self.x, self.dy, self.w = a, b, self.w.float()
        try:
            return self.bf16()
        finally:
            self.x, self.w, self.dy = keep

    def graph(self, cudnn, handle):
        """Return the graph, its tensors by pointer: two codes, two scalar scales, BF16 out."""
        t = cudnn.data_type
        g = cudnn.pygraph(
            io_data_type=t.FP8_E4M3, intermediate_data_type=t.FLOAT, compute_data_type=t.FLOAT, handle=handle
        )
        da, db, do = list(self.a.shape), list(self.b.shape), list(self.out.shape)
        a = g.tensor(name="a", dim=da, stride=strides(da, self.layouts[0]), data_type=t.FP8_E4M3)
        b = g.tensor(name="b", dim=db, stride=strides(db, self.layouts[1]), data_type=t.FP8_E4M3)
        how = {"padding": self.pad, "stride": self.stride, "dilation": [1, 1]}
        if self.direction == "fprop":
            y = g.conv_fprop(image=a, weight=b, **how)
        elif self.direction == "dgrad":
            y = g.conv_dgrad(loss=a, filter=b, **how)
        else:
            y = g.conv_wgrad(image=a, loss=b, **how)
        y.set_dim(do).set_stride(strides(do, "c")).set_data_type(t.FLOAT)
        one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": t.FLOAT}
        sa, sb = g.tensor(name="sa", **one), g.tensor(name="sb", **one)
        y = g.mul(a=y, b=sa)
        y.set_data_type(t.FLOAT)
        y = g.mul(a=y, b=sb)
        y.set_output(True).set_data_type(t.BFLOAT16).set_dim(do).set_stride(strides(do, "c"))
        g.validate()
        g.build_operation_graph()
        pointers = {a: self.qa, b: self.qb, sa: self.sa, sb: self.sb, y: self.y}
        return g, {key: value.data_ptr() for key, value in pointers.items()}


def time_of(torch, run, budget_ms=25.0):
    """Median ms of a launch, queued behind a sleep so that the host does not count."""
    run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    count = int(max(5, min(40, budget_ms / max(begin.elapsed_time(end), 1e-3))))
    times = []
    for _ in range(3):
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return sorted(times)[1]


def transposer(torch):
    """A byte transpose by Triton, (rows, columns) to (columns, rows)."""
    import triton
    import triton.language as tl

    global _transpose_kernel

    @triton.jit
    def _transpose_kernel(src, dst, rows, cols, BLOCK: tl.constexpr):
        r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        tile = tl.load(src + r[:, None] * cols + c[None, :], mask)
        tl.store(dst + c[:, None] * rows + r[None, :], tl.trans(tile), tl.trans(mask))

    def run(src, dst, rows, cols):
        grid = (-(-rows // 128), -(-cols // 128))
        _transpose_kernel[grid](src, dst, rows, cols, BLOCK=128, num_warps=8)

    return run


def passes(case, torch):
    """Return the ms of the passes around the products: maxima and casts of x and dy, transposes of codes."""
    row = {}
    for name, t in (("x", case.x), ("dy", case.dy)):
        row[f"amax_{name}"] = time_of(torch, lambda t=t: torch.linalg.vector_norm(t, float("inf")))
        row[f"cast_{name}"] = time_of(torch, lambda t=t: t.to(torch.float8_e4m3fn))
    try:
        turn = transposer(torch)
        for name, t in (("x", case.x), ("dy", case.dy), ("w", case.w)):
            rows = t.shape[0]
            src = torch.empty(t.numel(), dtype=torch.uint8, device="cuda").random_(0, 127)
            dst = torch.empty_like(src)
            row[f"transpose_{name}"] = time_of(torch, partial(turn, src, dst, rows, src.numel() // rows))
        row["transpose_right"] = bool((dst.view(-1, rows).t().reshape(-1) == src).all())
    except Exception as error:  # the table can do without
        row["transpose_error"] = short(error)
    return row


def heuristic_plans(case, cudnn, handle):
    """Yield (name, run, workspace) of each plan that a heuristic mode lists, once per plan."""
    seen = set()
    for mode in ("A", "B", "FALLBACK"):
        try:
            g, pack = case.graph(cudnn, handle)
            g.create_execution_plans([getattr(cudnn.heur_mode, mode)])
            count = g.get_execution_plan_count()
        except Exception as error:
            yield mode, None, short(error)
            continue
        for i in range(count):
            name = g.get_plan_name_at_index(i)
            if name in seen or left() < 6:
                continue
            seen.add(name)
            try:
                g.build_plan_at_index(i)
                yield f"{mode}: {name}", *runner(case, g, pack, i, handle)
            except Exception as error:
                yield f"{mode}: {name}", None, short(error)


def swept_plans(case, cudnn, handle):
    """Yield (name, run, workspace) of each configuration of engine 2."""
    for config in SWEEP:
        for split in (None, 2, 4) if config == 17 else (None,):
            if left() < 6:
                return
            try:
                g, pack = case.graph(cudnn, handle)
                knobs = {cudnn.knob_type.KERNEL_CFG: config}
                if split:
                    knobs[cudnn.knob_type.SPLIT_K_SLC] = split
                g.create_execution_plan(2, knobs)
                g.build_plan_at_index(0)
                yield f"cfg {config}" + (f" split {split}" if split else ""), *runner(case, g, pack, 0, handle)
            except Exception as error:
                yield f"cfg {config} split {split}", None, short(error)


def runner(case, g, pack, index, handle):
    """Return a function that executes a built plan, and its workspace."""
    size = g.get_workspace_size_plan_at_index(index)
    workspace = case.torch.empty(max(size, 16), dtype=case.torch.uint8, device="cuda")

    def run():
        g.execute_plan_at_index(pack, workspace.data_ptr(), index, handle)

    return run, workspace


def differences(case, exact):
    """Largest and RMS difference beside the RMS of the exact result."""
    y, norm = case.y.float(), exact.float().pow(2).mean().sqrt()
    d = y - exact
    return round((d.abs().max() / norm).item(), 5), round((d.pow(2).mean().sqrt() / norm).item(), 6)


def measure(case, plans, lock, torch):
    """Time plans under the lock; return them as [name, ms, differences] and the errors."""
    rows, errors, exact = [], [], None
    for name, run, workspace in plans:
        if run is None:
            errors.append(f"{name}: {workspace}")
            continue
        try:
            with lock:
                if exact is None:
                    exact = case.exact()
                case.y.fill_(float("nan"))
                run()
                torch.cuda.synchronize()
                wrong = differences(case, exact)
                ms = time_of(torch, run)
            rows.append([name, round(ms, 4), *wrong])
        except Exception as error:
            errors.append(f"{name}: {short(error)}")
        del run, workspace
    return rows, errors


def work(argument, tasks, lock):
    """Take tasks until none is left, or no time."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.init()
    cudnn = find_frontend(argument)
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    while left() > 8:
        try:
            kind, name, direction = tasks.get(timeout=1)
        except Exception:
            return
        try:
            case = Case(name, direction, torch)
            row = {"kind": kind, "shape": name, "sizes": SHAPES[name], "direction": direction}
            with lock:
                ms = time_of(torch, case.bf16) if kind == "heuristics" else None  # a sweep's row has the other's
                if kind == "heuristics" and direction == "fprop":
                    row["passes"] = {k: round(v, 4) for k, v in passes(case, torch).items()}
            if ms:
                row["bf16_ms"], row["bf16_tflops"] = round(ms, 4), round(case.flops / ms / 1e9, 1)
            plans = heuristic_plans if kind == "heuristics" else swept_plans
            rows, errors = measure(case, plans(case, cudnn, handle), lock, torch)
            if ms:
                with lock:  # BF16 once more: the clock moves
                    row["bf16_again_ms"] = round(time_of(torch, case.bf16), 4)
            if rows:
                fastest = min(rows, key=lambda r: r[1])
                row["fp8"], row["fp8_ms"] = fastest[0], fastest[1]
                row["fp8_tflops"] = round(case.flops / fastest[1] / 1e9, 1)
            if rows and ms:
                row["ratio"] = round(min(row["bf16_ms"], row["bf16_again_ms"]) / fastest[1], 3)
            row["plans"], row["errors"] = rows, sorted(set(errors))[:4]
            row["at"] = round(time.time() - START, 1)
            say(**row)
        except Exception as error:
            say(kind=kind, shape=name, direction=direction, error=short(error))
        case = None
        torch.cuda.empty_cache()


def main():
    """Start the workers."""
    import torch

    argument = sys.argv[1] if len(sys.argv) > 1 else None
    named = [
        n for n in dir(torch.ops.aten) if "conv" in n and any(w in n for w in ("scaled", "fp8", "float8", "quant"))
    ]
    say(torch=torch.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), ops=named)
    if not torch.cuda.is_available():
        say(error="no GPU")
        return
    try:
        x = torch.zeros(16, 64, 8, 8, device="cuda").to(torch.float8_e4m3fn).to(memory_format=torch.channels_last)
        torch.conv2d(x, x[:, :, :3, :3].contiguous(memory_format=torch.channels_last))
        say(torch_conv2d="takes float8_e4m3fn")
    except Exception as error:
        say(torch_conv2d=short(error))
    cudnn = find_frontend(argument)
    say(frontend=cudnn.__version__, backend=cudnn.backend_version(), gpu=torch.cuda.get_device_name())
    spawn = multiprocessing.get_context("spawn")
    tasks, lock = spawn.Queue(), spawn.Lock()
    for kind in ("heuristics", "sweep"):
        for name in SHAPES:
            for direction in ("fprop", "dgrad", "wgrad"):
                if kind == "heuristics" or not ("depthwise" in name or "stem" in name):
                    tasks.put((kind, name, direction))
    count = max(1, min(13, (os.cpu_count() or 2) - 2))
    workers = [spawn.Process(target=work, args=(argument, tasks, lock), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=max(1.0, left() + 6))
    for worker in workers:
        if worker.is_alive():
            say(error="a worker was still busy", pid=worker.pid)
            worker.kill()
    say(done=round(time.time() - START, 1))


if __name__ == "__main__":
    main()
