"""The peer of case `start`: the script that one would write to fine-tune a LLaVA folder with transformers' Trainer.

    python trainer_script.py MODEL_FOLDER DATA_JSON LOSS_FILE

Importing it does nothing; it ends after LOSS_FILE has the loss of the first step. It takes the lighter classes (tokenizer and
image processor, not AutoProcessor), which is to the peer's advantage.
"""

import sys
from pathlib import Path


def main(model_folder: str, data_json: str, loss_file: str) -> None:
    import json

    import torch
    from PIL import Image
    from transformers import (
        AutoTokenizer,
        LlavaForConditionalGeneration,
        SiglipImageProcessorPil,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    model = LlavaForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    processor = SiglipImageProcessorPil.from_pretrained(model_folder)
    vision = model.config.to_dict()["vision_config"]
    visual = [model.config.image_token_id] * (vision["image_size"] // vision["patch_size"]) ** 2
    rows = json.loads(Path(data_json).read_text())
    root = Path(data_json).parent

    def example(row: dict) -> dict:
        question, answer = (turn["value"].removeprefix("<image>\n") for turn in row["conversations"])
        prompt = visual + tokenizer.encode(question + "\n", add_special_tokens=False)
        target = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        pixels = processor(Image.open(root / row["image"]).convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return {"input_ids": torch.tensor(prompt + target), "labels": torch.tensor([-100] * len(prompt) + target), "pixel_values": pixels}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> dict:
            return example(rows[i])

    def collate(examples: list[dict]) -> dict:
        batch = {name: torch.stack([e[name] for e in examples]) for name in examples[0]}
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    class FirstLoss(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # noqa: ARG002 - the peer's signature
            if logs and "loss" in logs and state.global_step == 1:
                Path(loss_file).write_text(f"{logs['loss']!r}\n")

    arguments = TrainingArguments(
        output_dir=str(Path(loss_file).parent / "out"), per_device_train_batch_size=len(rows), max_steps=1, learning_rate=1e-3,
        use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, remove_unused_columns=False, dataloader_pin_memory=False,
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(), data_collator=collate, callbacks=[FirstLoss()]).train()


if __name__ == "__main__":
    main(*sys.argv[1:4])
