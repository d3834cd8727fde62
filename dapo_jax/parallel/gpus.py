"""Host: NVIDIA GPUs to compile for without having one, and their peak speeds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU model: what XLA's compiler needs to know, and its peak speed."""

    kind: str  # JAX's device_kind
    capability: tuple[int, int]  # CUDA compute capability
    cores: int  # streaming multiprocessors
    fp32_units: int  # per core
    threads: int  # per core
    shared_memory: tuple[int, int]  # bytes per core, and the most for one block
    l2_cache: int  # bytes
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: float  # bytes/s of its memory
    flops: float | None  # FLOP/s of dense bfloat16 products; None if they are slow
    float32_flops: float  # FLOP/s of float32 products
    link: float  # bytes/s that a GPU sends to others on its host: NVLink or PCIe
    network: float  # bytes/s that a GPU sends to other hosts: its share of the network cards

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text: the compiler's description of an absent GPU."""
        major, minor = self.capability
        per_core, per_block = self.shared_memory
        accelerated = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        return f"""
            gpu_device_info {{
              name: "{self.kind}"
              cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
              core_count: {self.cores}  fpus_per_core: {self.fp32_units}  clock_rate_ghz: {self.clock}
              threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: {self.threads}
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              shared_memory_per_core: {per_core}  shared_memory_per_block: 49152
              shared_memory_per_block_optin: {per_block}
              l2_cache_size: {self.l2_cache}
              device_memory_size: {self.memory}  memory_bandwidth: {int(self.bandwidth)}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 12 }}
            runtime_version {{ major: 13 }}
            device_description_str: "{self.kind}"
        """


# Sources. A100 (80 and 40 GB), H100, H200 and B200: XLA's target configs (openxla/xla,
# xla/backends/gpu/target_config/specs). T4, L4 and RTX 4090: the table of compute capabilities in NVIDIA's CUDA
# programming guide. FLOP/s, bandwidth and links: NVIDIA's data sheets, for the SXM modules where there are several;
# NVLink counts one direction, PCIe 16 lanes. GH200 memory: the 97871 MiB that nvidia-smi shows (the 480 GB in its name
# belong to its CPU). Network: one card per GPU in NVIDIA's DGX systems; T4 and L4: an eighth of the 100 Gbit/s of cloud
# machines with eight (AWS g4dn.metal, Google g2-standard-96); RTX 4090: 10 Gbit/s Ethernet.
#
# name, capability | cores, fp32_units, threads, shared memory in KiB per core and per block, l2_cache in KiB | clock,
# memory in bytes, bandwidth in GB/s, flops (0: slow) and float32_flops in TFLOP/s, link and network in GB/s | kind
_TABLE = """
t4         7.5 |  40  64 1024   64  64   4096 | 1.59   15843721216  320    0  8.1  16  1.56 | Tesla T4
a100       8.0 | 108  64 2048  164 163  40960 | 1.41   85100068864 2039  312 19.5 300 25    | NVIDIA A100-SXM4-80GB
a100-40gb  8.0 | 108  64 2048  164 163  40960 | 1.41   42331013120 1555  312 19.5 300 25    | NVIDIA A100-SXM4-40GB
l4         8.9 |  58 128 1536  100  99  49152 | 2.04   23580639232  300  121 30.3  32  1.56 | NVIDIA L4
rtx4090    8.9 | 128 128 1536  100  99  73728 | 2.52   25386352640 1008  165 82.6  32  1.25 | NVIDIA GeForce RTX 4090
h100       9.0 | 132 128 2048  228 227  51200 | 1.98   84942979072 3352  989 67   450 50    | NVIDIA H100 80GB HBM3
h200       9.0 | 132 128 2048  228 227  51200 | 1.98  151397597184 4800  989 67   450 50    | NVIDIA H200
b200      10.0 | 148 128 2048  228 227 129536 | 1.965 191514411008 7672 2250 75   900 50    | NVIDIA B200
gh200      9.0 | 132 128 2048  228 227  51200 | 1.98  102625181696 4000  989 67   450 50    | NVIDIA GH200 480GB
"""


def _row(line: str) -> tuple[str, Gpu]:
    names, chip, speed, kind = line.split(" | ")
    name, capability = names.split()
    major, minor = map(int, capability.split("."))
    cores, fp32_units, threads, per_core, per_block, l2_cache = map(int, chip.split())
    clock, memory, bandwidth, flops, float32_flops, link, network = map(float, speed.split())
    return name, Gpu(
        kind=kind,
        capability=(major, minor),
        cores=cores,
        fp32_units=fp32_units,
        threads=threads,
        shared_memory=(per_core << 10, per_block << 10),
        l2_cache=l2_cache << 10,
        clock=clock,
        memory=int(memory),
        bandwidth=bandwidth * 1e9,
        flops=flops * 1e12 or None,
        float32_flops=float32_flops * 1e12,
        link=link * 1e9,
        network=network * 1e9,
    )


GPUS = dict(map(_row, _TABLE.strip().splitlines()))
