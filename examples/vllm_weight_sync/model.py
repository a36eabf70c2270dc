"""A tiny Qwen3 as a directory that vLLM and transformers both read: configuration and tokenizer, no weights.

Made on the spot: nothing is downloaded. What the trainers teach it is ``TEXT``; ``PROMPT`` asks for its first sentence.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

PROMPT = "The engine answers"
SENTENCE = "The engine answers what the trainer has learned, and nobody had to start it again."
TEXT = [
    SENTENCE,
    "Every rank of the trainer sends the shards that it holds.",
    "Each worker of the engine receives what it keeps, and nothing else.",
    "A version is live once all workers have it, or it is not live at all.",
]
#: Of the tokenizer and of the model: a multiple of what vLLM shards by.
VOCABULARY = 384
#: Bytes, and the few pairs of them that are most frequent: a sentence is some forty tokens, and takes some learning.
LEARNED = 288
END = "<end>"


def write(directory: Path) -> None:
    """Write configuration and tokenizer; afterwards ``directory`` is a model to vLLM (``--load-format dummy``)."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    ).save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=LEARNED, special_tokens=[END], initial_alphabet=alphabet)
    )
    # Every token that the model can draw is one that the tokenizer can write.
    found.add_tokens([f"<{number}>" for number in range(found.get_vocab_size(), VOCABULARY)])
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END, pad_token=END)
