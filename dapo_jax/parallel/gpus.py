"""Host: NVIDIA GPUs to compile for without having one, and their peak figures."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """One GPU model: what XLA's compiler needs to know, and its speed."""

    kind: str  # JAX's device_kind
    capability: tuple[int, int]  # CUDA compute capability
    cores: int  # streaming multiprocessors
    fp32_units: int  # per core
    threads: int  # per core
    shared_memory: tuple[int, int]  # bytes per core, and the most that one block may ask for
    l2_cache: int  # bytes
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: float  # bytes/s of the memory
    flops: float | None  # FLOP/s of dense products of bfloat16; None where they are slow
    float32_flops: float  # FLOP/s of products of float32
    link: float  # bytes/s that a GPU sends to others of its host: NVLink, or PCIe
    network: float  # bytes/s that a GPU sends to other hosts: its share of the host's network cards

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text: what the compiler knows about an absent GPU."""
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


# Sources: for A100 (of 80 and 40 GB), H100, H200 and B200 XLA's own target configs (openxla/xla,
# xla/backends/gpu/target_config/specs); for T4, L4 and RTX 4090 the table of compute capabilities in NVIDIA's CUDA
# programming guide. FLOP/s, bandwidth and links: NVIDIA's data sheets, of the SXM modules where there are several,
# NVLink in one direction, PCIe with 16 lanes. The memory of a GH200 is the 97871 MiB that nvidia-smi shows: the 480
# GB of its name are its CPU's. Network: one card per GPU in NVIDIA's DGX systems; for T4 and L4 an eighth of the 100
# Gbit/s of clouds' machines with eight of them (AWS g4dn.metal, Google g2-standard-96); for an RTX 4090 10 Gbit/s
# Ethernet.
A100 = Gpu(
    "NVIDIA A100-SXM4-80GB",
    (8, 0),
    108,
    64,
    2048,
    (167936, 166912),
    41943040,
    1.41,
    85100068864,
    2.039e12,
    312e12,
    19.5e12,
    3e11,
    2.5e10,
)
H100 = Gpu(
    "NVIDIA H100 80GB HBM3",
    (9, 0),
    132,
    128,
    2048,
    (233472, 232448),
    52428800,
    1.98,
    84942979072,
    3.352e12,
    989e12,
    67e12,
    4.5e11,
    5e10,
)
GPUS = {
    "t4": Gpu(
        "Tesla T4",
        (7, 5),
        40,
        64,
        1024,
        (65536, 65536),
        4194304,
        1.59,
        15843721216,
        3.2e11,
        None,
        8.1e12,
        1.6e10,
        1.56e9,
    ),
    "a100": A100,
    "a100-40gb": replace(A100, kind="NVIDIA A100-SXM4-40GB", memory=42331013120, bandwidth=1.555e12),
    "l4": Gpu(
        "NVIDIA L4",
        (8, 9),
        58,
        128,
        1536,
        (102400, 101376),
        50331648,
        2.04,
        23580639232,
        3e11,
        121e12,
        30.3e12,
        3.2e10,
        1.56e9,
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        128,
        1536,
        (102400, 101376),
        75497472,
        2.52,
        25386352640,
        1.008e12,
        165e12,
        82.6e12,
        3.2e10,
        1.25e9,
    ),
    "h100": H100,
    "h200": replace(H100, kind="NVIDIA H200", memory=151397597184, bandwidth=4.8e12),
    "b200": Gpu(
        "NVIDIA B200",
        (10, 0),
        148,
        128,
        2048,
        (233472, 232448),
        132644864,
        1.965,
        191514411008,
        7.672e12,
        2250e12,
        75e12,
        9e11,
        5e10,
    ),
    "gh200": replace(H100, kind="NVIDIA GH200 480GB", memory=97871 << 20, bandwidth=4e12),
}
