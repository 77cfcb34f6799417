"""Ask a question of a Hugging Face model with transformers only, without this project.

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
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
