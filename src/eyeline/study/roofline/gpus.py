"""The prices: what a GPU is made for, by its maker's data sheet, and the shares of it that kernels reach. All constants of the model are in
this file. They were written before anything was made faster by it; a change of one is a change of every number that was published.
"""

from dataclasses import dataclass

from eyeline.models.flops import PEAKS


@dataclass(frozen=True)
class GPU:
    """Rates per second. `bf16` is dense, with float32 accumulation; `fp32` without tensor cores, since TF32 stays off here."""

    name: str
    bf16: float
    fp32: float
    bandwidth: float  # bytes of its memory
    memory: float  # bytes
    link: float  # bytes of one direction of its link to the host
    capability: tuple[int, int]
    attention: float  # the share of `bf16` that flash attention reaches forward


# NVIDIA's data sheets: H100 (2023), H200 (2024), A100 (2021), HGX B200 (2025), L40S (2023), L4 (2023), and the architecture papers of Ada
# (RTX 4090) and Blackwell (RTX 5090). Links: PCIe 4.0 ×16 is 32 GB/s, 5.0 is 64 GB/s. Shares of flash attention, version 2, which torch's
# variable-length attention is: 72 % of an A100's peak and 35 % of an H100's (Dao 2023; Shah et al. 2024), less for short documents; others
# by the nearer of the two architectures.
GPUS = {
    "a100-40": GPU("A100 SXM 40 GB", PEAKS["A100"], 1.95e13, 1.555e12, 4.0e10, 3.2e10, (8, 0), 0.65),
    "a100-80": GPU("A100 SXM 80 GB", PEAKS["A100"], 1.95e13, 2.039e12, 8.0e10, 3.2e10, (8, 0), 0.65),
    "h100-80": GPU("H100 SXM 80 GB", PEAKS["H100"], 6.7e13, 3.35e12, 8.0e10, 6.4e10, (9, 0), 0.35),
    "h100-pcie": GPU("H100 PCIe 80 GB", PEAKS["H100 PCIe"], 5.1e13, 2.0e12, 8.0e10, 6.4e10, (9, 0), 0.35),
    "h200": GPU("H200 SXM 141 GB", PEAKS["H200"], 6.7e13, 4.8e12, 1.41e11, 6.4e10, (9, 0), 0.35),
    "b200": GPU("B200 SXM 180 GB", PEAKS["B200"], 7.5e13, 8.0e12, 1.8e11, 6.4e10, (10, 0), 0.25),
    "l40s": GPU("L40S 48 GB", PEAKS["L40S"], 9.16e13, 8.64e11, 4.8e10, 3.2e10, (8, 9), 0.6),
    "l4": GPU("L4 24 GB", PEAKS["L4"], 3.03e13, 3.0e11, 2.4e10, 3.2e10, (8, 9), 0.6),
    "rtx-4090": GPU("GeForce RTX 4090 24 GB", PEAKS["RTX 4090"], 8.26e13, 1.008e12, 2.4e10, 3.2e10, (8, 9), 0.6),
    "rtx-5090": GPU("GeForce RTX 5090 32 GB", PEAKS["RTX 5090"], 1.048e14, 1.792e12, 3.2e10, 6.4e10, (12, 0), 0.6),
}

# The best products of large matrices that were published reach 73 to 87 % of the peak (H100: 720 of 989 TFLOP/s); those of a training step
# are smaller, and a GPU that computes without a pause lowers its clock.
PRODUCTS = 0.70
GROUPED = 0.55  # products of experts with a few hundred rows each, whose tiles are not full
FLOAT32 = 0.80  # products without tensor cores
BACKWARD = 0.85  # flash attention's backward pass, of its forward's rate: 550 to 650 TFLOP/s there (Dao 2023)
DELTA = 0.20  # the gated delta rule's small products in chunks of 64 tokens
BANDWIDTH = 0.85  # passes over memory: STREAM-like kernels reach 85 to 92 % of a data sheet's number
LINK = 0.80  # copies from pinned memory

KERNEL_S = 2.0e-6  # the least that a kernel takes, from its start to the next one's
LAUNCH_S = 6.0e-6  # the host's time to ask for an operator of PyTorch without compilation, autograd included
READ_S = 2.0e-5  # until the GPU is busy again after the host has waited for it
