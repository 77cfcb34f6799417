"""Asks a model of Hugging Face, by transformers alone: nothing of this project is needed.

usage: generate.py DIRECTORY QUESTION
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, question = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    found = model.generate(**asked, max_new_tokens=64, do_sample=False)
    answer = found[0, asked["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
