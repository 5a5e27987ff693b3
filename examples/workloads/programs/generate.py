#!/usr/bin/env python3
"""Tests transformers: a small decoder with random weights and a static cache, so that the forward
pass of a token is compiled and captured in CUDA graphs.

The tokens must be those that the plain model gives with a growing cache.
"""

from __future__ import annotations

import contextlib
import os

# No model is loaded, so neither library may search for one, or for updates.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from program import NotHereError, ProgramCheck, run

VOCABULARY, PROMPT, TOKENS, BATCH = 1000, 16, 64, 2


def body(program: ProgramCheck) -> None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, __version__  # noqa: PLC0415 - may be missing
    except ImportError as e:
        raise NotHereError(f"transformers cannot be imported: {e}") from e
    torch.manual_seed(15)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to("cuda").eval()
    generator = torch.Generator().manual_seed(16)
    prompt = torch.randint(1, VOCABULARY, (BATCH, PROMPT), generator=generator).cuda()
    given = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": TOKENS,
        "pad_token_id": 0,
    }
    plain = model.generate(prompt, **given)
    fast = model.generate(prompt, cache_implementation="static", **given)
    program.check("64 tokens are decoded", fast.shape == (BATCH, PROMPT + TOKENS), fast.shape)
    program.check("the compiled model gives the plain one's tokens", torch.equal(plain, fast))
    program.value("tokens", [str(row) for row in fast[:, PROMPT:].tolist()])
    with torch.no_grad():
        logits = model(fast).logits
    program.value("size of the logits", logits.abs().mean().item(), 1e-2)
    with contextlib.suppress(Exception):
        from torch._dynamo.utils import counters  # noqa: PLC0415 - private, only for a note

        program.note("passes without a graph", counters["inductor"]["cudagraph_skips"])
    program.note("versions", f"PyTorch {torch.__version__}, transformers {__version__}")
    program.launches = 2 * TOKENS


if __name__ == "__main__":
    run(body)
