"""rlctl: RL post-training with Megatron-Core or PyTorch FSDP2, on one code path from CPU to cluster."""

__version__ = "0.1.0"
