"""Makes safetensors.safetensors and the shards beside it, with the format's own library.

Run by hand: python3 tests/golden/make_safetensors.py tests/golden   (pip install safetensors torch)
test_safetensors.c knows the values.
"""
import json
import sys

import torch
from safetensors.torch import save_file

folder = sys.argv[1]
numbers = torch.arange(6).reshape(2, 3)
save_file(
    {
        "f32": numbers / 4,
        "f64": numbers.double() / 3,
        "bf16": numbers.bfloat16() / 2,
        "i64": numbers - (1 << 40),
        "i32": numbers.int() - 3,
        "u8": numbers.to(torch.uint8) * 40,
        "bool": numbers % 2 == 0,
        "f16": numbers.half(),
        "h.0.\u00e9\"\\": torch.tensor(7.0),
        "empty": torch.zeros(0, 5),
    },
    f"{folder}/safetensors.safetensors",
    metadata={"format": "pt", "alias:head": "f32"},
)
shards = {"a.weight": "golden-00001-of-00002.safetensors", "b.weight": "golden-00002-of-00002.safetensors"}
for i, (name, file) in enumerate(shards.items()):
    save_file({name: torch.full((2,), i + 1.0)}, f"{folder}/{file}", metadata={"format": "pt"})
with open(f"{folder}/golden.safetensors.index.json", "w") as index:
    json.dump({"metadata": {"total_size": 16}, "weight_map": shards}, index)
