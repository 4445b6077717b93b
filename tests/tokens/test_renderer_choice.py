import json
import shutil
import subprocess
import sys

import pytest

from rollyard.core.failure import InvalidRequest
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import ChatML, Tokenizers, load_renderer


def with_template(folder, template):
    shutil.copytree(tokenizer_dir(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizers().load(folder)


def test_a_chatml_template_gets_the_chatml_renderer(small):
    assert isinstance(load_renderer(small, "my-model"), ChatML)


def test_a_template_that_is_not_chatml_is_refused_with_the_choices(tmp_path):
    tokenizer = with_template(tmp_path, "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match=r"my-model.*chatml, .*qwen3"):
        load_renderer(tokenizer, "my-model")


def test_the_default_system_prompt_of_a_template_is_kept(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = with_template(tmp_path, template)
    messages = [{"role": "user", "content": "hi"}]
    renderer = load_renderer(tokenizer, "my-model")
    assert renderer.render(messages) == tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def test_an_unknown_renderer_is_refused_with_the_choices(small):
    with pytest.raises(InvalidRequest, match=r"'nope'; there are chatml, .*qwen3"):
        load_renderer(small, "m", "nope")


def test_a_renderer_that_does_not_fit_the_vocabulary_is_refused(small):
    with pytest.raises(InvalidRequest, match="does not fit"):
        load_renderer(small, "m", "qwen3")


def test_no_heavy_package_is_imported_before_it_is_needed():
    code = (
        "import sys; from rollyard.testing.tokenizer_files import tokenizer_dir as d;"
        "from rollyard.tokens import Tokenizers, load_renderer as load;"
        "load(Tokenizers().load(d()), 'my-model').render([{'role': 'user', 'content': 'hi'}]);"
        "print(*{'renderers', 'openai', 'transformers', 'torch', 'huggingface_hub', 'pydantic'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
