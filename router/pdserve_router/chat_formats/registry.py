"""The chat formats that are known, by name and by chat template."""

from pdserve_router.chat_formats.base import ChatFormat
from pdserve_router.chat_formats.deepseek_r1 import DeepseekR1
from pdserve_router.chat_formats.hermes import Hermes
from pdserve_router.chat_formats.llama3_json import Llama3Json
from pdserve_router.chat_formats.mistral import Mistral, MistralList
from pdserve_router.chat_formats.qwen3_coder import Qwen3Coder

FORMATS: dict[str, ChatFormat] = {
    each.name: each
    for each in (
        Hermes(),
        Qwen3Coder(),
        Llama3Json(),
        Mistral(),
        MistralList(),
        DeepseekR1(),
    )
}
# Values of --chat-format: the template decides; answers are text only.
AUTO, NONE = "auto", "none"


def choose_format(wanted: str, template: str) -> ChatFormat | None:
    """Return the format of that name, for AUTO that of the first that knows the template; None if
    answers are text only.
    """
    if wanted == AUTO:
        return next((each for each in FORMATS.values() if each.matches(template)), None)
    return FORMATS.get(wanted)
