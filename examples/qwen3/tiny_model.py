"""Write a small random Qwen3 in Hugging Face format, and conversations and preferences to train it.

    python examples/qwen3/tiny_model.py DIRECTORY

DIRECTORY receives model/ (config.json, weights, tokenizer with a chat template), train.jsonl,
valid.jsonl and prompts.jsonl, and pairs of answers in pairs_train.jsonl and pairs_valid.jsonl.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
COLOURS = {
    "a banana": "yellow",
    "snow": "white",
    "coal": "black",
    "the sky": "blue",
    "grass": "green",
    "blood": "red",
    "an elephant": "grey",
    "a carrot": "orange",
}
# Qwen's template without tool calls and reasoning.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def generate_conversations(count: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield conversations with one to four questions about colours."""
    generator = random.Random(seed)
    for _ in range(count):
        messages = []
        for _ in range(generator.randint(1, 4)):
            thing = generator.choice(list(COLOURS))
            messages += [
                {"role": "user", "content": f"What colour is {thing}?"},
                {"role": "assistant", "content": f"{thing.capitalize()} is {COLOURS[thing]}."},
            ]
        yield {"messages": messages}


def generate_pairs(count: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield pairs of answers to a question about a colour, of which one is true."""
    generator = random.Random(seed)
    for _ in range(count):
        thing = generator.choice(list(COLOURS))
        other = generator.choice([name for name in COLOURS.values() if name != COLOURS[thing]])
        colours = {"chosen": COLOURS[thing], "rejected": other}
        yield {
            "prompt": [{"role": "user", "content": f"What colour is {thing}?"}],
            **{
                key: [{"role": "assistant", "content": f"{thing.capitalize()} is {colour}."}]
                for key, colour in colours.items()
            },
        }


def write_lines(path: Path, records: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_model(directory: Path) -> None:
    """Write a model with random weights and a new tokenizer."""
    import torch
    import transformers

    from flagscale.train.data import train_bpe

    torch.manual_seed(1234)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    corpus = [json.dumps(conversation) for conversation in generate_conversations(200, seed=3)]
    tokenizer = train_bpe.train_tokenizer(corpus, train_bpe.BpeSettings(320, SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a small random Qwen3 in Hugging Face format, and conversations and "
        "preferences to train it. Nothing is downloaded."
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="receives model/ and files of conversations, prompts and pairs of answers",
    )
    directory: Path = parser.parse_args().directory
    (directory / "model").mkdir(parents=True, exist_ok=True)
    write_model(directory / "model")
    for name, count, seed in (("train", 2000, 1), ("valid", 100, 2)):
        write_lines(directory / f"{name}.jsonl", generate_conversations(count, seed))
        write_lines(directory / f"pairs_{name}.jsonl", generate_pairs(count // 5, seed))
    prompt = [{"role": "user", "content": "What colour is a banana?"}]
    (directory / "prompts.jsonl").write_text(json.dumps({"messages": prompt}) + "\n")
    print(f"wrote a model and conversations to {directory}")


if __name__ == "__main__":
    main()
