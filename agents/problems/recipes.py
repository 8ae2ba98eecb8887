"""What the validation and the test split hold: families, their models and how many cases each has."""

from __future__ import annotations

from rlplace.agents.problems.graphs import Recipe

_LLAMA = "hf:llama,hidden_size=1024,intermediate_size=2816,num_attention_heads=16,num_key_value_heads=16"
_MIXTRAL = "hf:mixtral,hidden_size=1024,intermediate_size=2048,num_attention_heads=16,num_key_value_heads=8,num_local_experts=8"

_WHISPER = "hf:whisper,encoder_layers=6,decoder_layers=6,d_model=512"

VALIDATION: dict[str, tuple[Recipe | str, ...]] = {
    "zoo:unet": (
        ("zoo:unet", 16, 64), ("zoo:unet,depth=3,width=64", 8, 64), ("zoo:unet,depth=5,width=16", 32, 64),
    ),
    "hf:clip": (("hf:clip", 8, 64), ("hf:clip", 32, 64)),
    "hf:llama": ((f"{_LLAMA},num_hidden_layers=2", 8, 256), (f"{_LLAMA},num_hidden_layers=6", 2, 512)),
    "synthetic:towers": ("towers",) * 9,
}  # fmt: skip
"""Family to recipes of captured models, or shapes of synthetic graphs."""

TEST: dict[str, tuple[Recipe | str, ...]] = {
    "zoo:nasnet": (
        ("zoo:nasnet", 64, 64), ("zoo:nasnet,cells=4,nodes=8,seed=1", 32, 64), ("zoo:nasnet,cells=8,nodes=6,seed=2", 128, 64),
        ("zoo:nasnet,cells=6,nodes=7,seed=3,width=128", 32, 64), ("zoo:nasnet,cells=5,nodes=10,seed=4,width=96", 64, 64),
    ),
    "zoo:dlrm": (
        ("zoo:dlrm", 4096, 64), ("zoo:dlrm,tables=8,rows=1000000", 16384, 64), ("zoo:dlrm,tables=60,width=32", 2048, 64),
        ("zoo:dlrm,tables=26,width=128,hidden=1024,layers=4", 8192, 64), ("zoo:dlrm,tables=40,rows=200000,bag=16", 4096, 64),
    ),
    "synthetic:wavefront": ("wavefront",) * 12,
    "hf:mixtral": ((f"{_MIXTRAL},num_hidden_layers=2", 4, 256), (f"{_MIXTRAL},num_hidden_layers=4", 2, 256)),
    "hf:t5": (("hf:t5", 8, 128), ("hf:t5,num_layers=3,num_decoder_layers=3,d_model=1024,d_ff=4096", 4, 256)),
    "hf:whisper": (("hf:whisper", 4, 64), (f"{_WHISPER},encoder_attention_heads=8,decoder_attention_heads=8", 8, 128)),
    "hf:swin": (("hf:swin", 8, 64), ("hf:swin,depths=2/2/2/2,embed_dim=128,num_heads=4/8/16/32", 16, 64)),
    "hf:convnext": (("hf:convnext", 8, 64), ("hf:convnext,depths=2/2/4/2,hidden_sizes=128/256/512/1024", 16, 64)),
}  # fmt: skip
"""The same for the test split; none of its families is in training or validation."""

VALIDATION_COUNTS = {"zoo:unet": 5, "hf:clip": 5, "hf:llama": 5, "synthetic:towers": 9}
TEST_COUNTS = {
    "zoo:nasnet": 15, "zoo:dlrm": 15, "synthetic:wavefront": 12, "hf:mixtral": 6, "hf:t5": 6, "hf:whisper": 6, "hf:swin": 6,
    "hf:convnext": 6,
}  # fmt: skip

GROUPS = {"zoo:nasnet": (64, 200), "zoo:dlrm": (64, 200)}
"""Range of groups of families whose branches would be merged in fewer; that of the others is `OTHER_GROUPS`. Log-uniform."""
OTHER_GROUPS = (24, 200)
