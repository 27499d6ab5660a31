"""From what a client sends to what an engine takes: checks, tokens, defaults."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pdserve_common.errors import DeadlineExceededError, InvalidRequestError, ModelNotFoundError
from pdserve_common.limits.validation import (
    MAX_BAD_WORD_TOKENS,
    validate_choice,
    validate_pooling_params,
    validate_prediction,
    validate_priority,
    validate_prompt,
    validate_prompt_logprobs,
    validate_request_id,
    validate_sampling_params,
    validate_token_ids,
)
from pdserve_common.structured.accepted import AcceptedConstraints
from pdserve_common.types.engine import EngineCoreRequest, Generate, Pool
from pdserve_common.types.engine_client import Tensors
from pdserve_common.types.lora import LoRARequest
from pdserve_router.chat_formats.base import ParserOptions
from pdserve_router.chat_formats.registry import AUTO, choose_format
from pdserve_router.requests.input.constraint import (
    accepted_digests,
    check_constraint,
    constrained_params,
)
from pdserve_router.requests.input.generation_request import ClientRequest, GenerationRequest
from pdserve_router.requests.input.logprob_limits import check_message
from pdserve_router.requests.input.pictures import RequestPictures, pictures_of
from pdserve_router.requests.input.pooling_input import PoolingInput
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_RESUMED_TOKENS,
    NotSmallError,
)
from pdserve_router.requests.input.request_sizes import complete_params, most_prompt_tokens
from pdserve_router.requests.input.tool_use import (
    check_tool_use,
    parser_options,
)
from pdserve_router.requests.output.resume import (
    ResumedCompletion,
    begun_adapter,
    require_seed,
    validate_resume,
)
from pdserve_router.requests.records.request_metrics import Timeline
from pdserve_router.requests.tenants.tenant import client_id, owned
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.routing.prefix_index import prefix_hashes

MAX_CACHE_SALT_CHARS = 256
# Hashing so many takes 0.3 ms; shorter prompts are hashed when a route is chosen.
MAX_UNHASHED_TOKENS = 8192
# How many times as long as the model takes it a prompt may be that is cut.
MAX_TRUNCATED = 8
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
# The internal id is the client's, cut to this, and a random suffix.
_ID_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedInput:
    """An EngineCoreRequest, when it arrived and when its tokenizing began and ended (monotonic ns,
    of the whole machine), and where its answer goes on.
    """

    core_request: EngineCoreRequest
    # The client has set max_tokens; else it is what fits.
    has_max_tokens: bool
    # How the text of the answer is read; None: it is no more than text.
    parsing: ParserOptions | None = None
    resume: Sequence[ResumedCompletion] = ()
    # Digests of constraints that were found to be enforced.
    accepted_constraints: tuple[bytes, ...] = ()
    arrival_ns: int
    tokenize_start_ns: int
    tokenize_end_ns: int
    # The hashes of a long prompt, whose hashing would hold up the event loop; empty for others.
    prefix_hashes: tuple[int, ...] = ()
    # As RoutingPolicy has it: its tenant's own.
    session: str = ""
    # Its prompt is a conversation.
    is_chat: bool = False
    # Its client asks for what workers tell of it.
    include_events: bool = False
    # Bytes that the engine's request names.
    tensors: Tensors = dataclasses.field(default_factory=dict)

    def begin_timeline(self) -> Timeline:
        """Return what has happened so far; the caller's own."""
        return Timeline(
            arrival_ns=self.arrival_ns,
            tokenize_start_ns=self.tokenize_start_ns,
            tokenize_end_ns=self.tokenize_end_ns,
        )


class InputProcessor:
    """Turns what clients ask for into EngineCoreRequests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        pictures: RequestPictures | None = None,
        model_name: str,
        default_deadline_s: float,
        max_deadline_s: float,
        chat_format: str = AUTO,
        share_prefixes: bool = False,
        is_inline: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pictures`: of a model that takes any. `share_prefixes`: also among tenants. `is_inline`:
        on an event loop, which does not wait for what takes long.
        """
        self._pictures = pictures or RequestPictures()
        self._share_prefixes = share_prefixes
        self._clock = clock
        self._is_inline = is_inline
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._accepted = AcceptedConstraints()
        self._chat_format = choose_format(chat_format, tokenizer.chat_template)
        self._default_deadline_s = default_deadline_s
        self._max_deadline_s = max_deadline_s

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    def check_model(self, name: str, limits: ModelLimits | None = None) -> None:
        """Raise ModelNotFoundError if a client names a model that is not served, nor, with limits,
        an adapter of it.
        """
        if name not in ("", self._model_name) and (limits is None or not limits.adapter(name)):
            raise ModelNotFoundError(
                f"model {name[:256]!r} is not served here, {self._model_name!r} is", field="model"
            )

    def _lora_request(
        self,
        request: ClientRequest,
        limits: ModelLimits,
        resume: Sequence[ResumedCompletion] = (),
    ) -> LoRARequest | None:
        """Return the adapter that the request names: it keeps it to its end, also when it is
        resumed. Raises ModelNotFoundError and what `begun_adapter` raises.
        """
        name = request.lora_name
        if name or request.model in ("", self._model_name):
            self.check_model(request.model)
        else:
            name = request.model
        if (begun := begun_adapter(resume, name, limits.held)) or not name:
            return begun
        if not request.lora_name:
            self.check_model(name, limits)
        return limits.lora_request(name)

    def remember(self, processed: Iterable[ProcessedInput]) -> None:
        """Do not check again what was checked, perhaps in another process."""
        for each in processed:
            for digest in each.accepted_constraints:
                self._accepted.add(digest)

    def check_constraint(self, request: GenerationRequest, limits: ModelLimits) -> None:
        """Check what an answer has to be; of the prompts of one body, it is the same. Raises
        InvalidRequestError naming the field, NotSmallError if it takes too long inline.
        """
        check_constraint(
            request.sampling_params.structured_outputs,
            request.tools,
            limits.capabilities,
            self._accepted,
            field=request.constraint_field,
            is_inline=self._is_inline,
        )

    def check_inline(self, num_chars: int) -> None:
        """Raise NotSmallError if tokenizing so much text takes too long inline."""
        if self._is_inline and num_chars > INLINE_BYTES:
            raise NotSmallError

    async def process(self, request: GenerationRequest, limits: ModelLimits) -> ProcessedInput:
        """Check and tokenize, after `check_constraint`. Raises InvalidRequestError naming the
        field.
        """
        lora_request = self._lora_request(request, limits, request.resume)
        _check_request(request)
        if request.sampling_params.bad_words_token_ids:
            raise InvalidRequestError(
                "bad_words_token_ids is set: the router makes them of bad_words",
                field="bad_words_token_ids",
            )
        if request.resume:
            require_seed(request.sampling_params)
        _check_rank(request.data_parallel_rank, limits)
        check_tool_use(request.tools, self._chat_format, limits.capabilities)
        # Before tokenizing, which is the expensive part.
        validate_sampling_params(
            request.sampling_params,
            vocab_size=limits.vocab_size,
            capabilities=limits.capabilities,
        )
        most = most_prompt_tokens(request, limits)
        if self._pictures.check_request(request, limits) and self._is_inline:
            raise NotSmallError
        tokenize_start_ns = self._now_ns()
        token_ids = await self.tokenize(
            text=request.text,
            messages=request.messages,
            token_ids=request.token_ids,
            tools=request.tools.tools if request.tools is not None else (),
            template_variables=request.template_variables,
            add_special_tokens=request.add_special_tokens,
            max_model_len=limits.max_model_len * (1 if most is None else MAX_TRUNCATED),
        )
        if most is not None:
            token_ids = token_ids[-most:]
        tokenize_end_ns = self._now_ns()
        validate_prompt(token_ids, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
        validate_prompt_logprobs(request.sampling_params, len(token_ids))
        params = complete_params(
            request.sampling_params,
            len(token_ids),
            limits,
            max_logprob_entries=request.max_logprob_entries,
        )
        parsing = self._parsing(request, token_ids)
        if parsing is not None:
            assert self._chat_format is not None, "it says how to parse"
            params = constrained_params(
                params,
                request.tools,
                self._chat_format,
                parsing.reasoning,
                self._tokenizer,
                self._accepted,
                field=request.constraint_field,
            )
        accepted = accepted_digests(
            request.sampling_params.structured_outputs,
            request.tools,
            params.structured_outputs,
            self._chat_format,
            self._accepted,
        )
        validate_resume(request.resume, params, vocab_size=limits.vocab_size)
        check_message(params, len(token_ids), limit=request.max_logprob_entries)
        params = dataclasses.replace(
            params, bad_words_token_ids=await self._bad_words_token_ids(params.bad_words)
        )
        eos_token_id = limits.eos_token_ids[0] if limits.eos_token_ids else None
        validate_choice(params, eos_token_id=eos_token_id, vocab_size=limits.vocab_size)
        # The last, as it takes longest.
        pictures = self._pictures.place(request, token_ids)
        engine_request = self._engine_request(
            request,
            token_ids,
            task=Generate(params),
            mm_features=pictures.mm_features,
            eos_token_id=eos_token_id,
            lora_request=lora_request,
            prediction_token_ids=await self._prediction(request.prediction, limits),
            data_parallel_rank=request.data_parallel_rank,
        )
        return ProcessedInput(
            tensors=pictures.tensors,
            core_request=engine_request,
            has_max_tokens=request.sampling_params.max_tokens is not None,
            parsing=parsing,
            resume=request.resume,
            accepted_constraints=accepted,
            arrival_ns=request.arrival_ns,
            tokenize_start_ns=tokenize_start_ns,
            tokenize_end_ns=tokenize_end_ns,
            prefix_hashes=_hashes_of_long(engine_request, limits),
            session=_session(request),
            is_chat=request.messages is not None,
            include_events=request.include_events,
        )

    async def process_pooling(self, request: PoolingInput, limits: ModelLimits) -> ProcessedInput:
        """Check and tokenize. Raises InvalidRequestError naming the field."""
        lora_request = self._lora_request(request, limits)
        _check_request(request)
        validate_pooling_params(request.pooling_params, limits.capabilities)
        cut = request.cut(limits.max_model_len)
        tokenize_start_ns = self._now_ns()
        token_ids = request.token_ids or ()
        if request.text is not None:
            token_ids = await self._tokenizer.encode_pooled(
                request.text,
                request.text_pair,
                add_special_tokens=request.add_special_tokens,
                max_tokens=limits.max_model_len * (1 if cut is None else MAX_TRUNCATED),
                cut=cut,
            )
        elif cut is not None:
            token_ids = cut.apply(token_ids)
        tokenize_end_ns = self._now_ns()
        validate_prompt(
            token_ids,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            is_pooling=True,
        )
        engine_request = self._engine_request(
            request,
            token_ids,
            task=Pool(request.pooling_params),
            lora_request=lora_request,
        )
        return ProcessedInput(
            core_request=engine_request,
            has_max_tokens=False,
            arrival_ns=request.arrival_ns,
            tokenize_start_ns=tokenize_start_ns,
            tokenize_end_ns=tokenize_end_ns,
            prefix_hashes=_hashes_of_long(engine_request, limits),
            session=_session(request),
        )

    def _engine_request(
        self, request: ClientRequest, token_ids: Sequence[int], **fields: Any
    ) -> EngineCoreRequest:
        arrival_time = request.arrival_ns / 1e9
        return EngineCoreRequest(
            request_id=f"{request.request_id[:_ID_CHARS]}-{secrets.token_hex(8)}",
            external_req_id=request.request_id,
            prompt_token_ids=tuple(token_ids),
            arrival_time=arrival_time,
            cache_salt=self._cache_salt(request),
            priority=request.priority,
            deadline=self._deadline(request.deadline, arrival_time),
            trace_headers=request.trace_headers,
            client_id=client_id(request.tenant, request.address),
            **fields,
        )

    async def _prediction(self, text: str, limits: ModelLimits) -> tuple[int, ...]:
        """Return the tokens of what a client thinks that the answer is like."""
        if not text:
            return ()
        token_ids = await self._tokenizer.encode(
            text, add_special_tokens=False, max_tokens=limits.max_model_len, field="prediction"
        )
        validate_prediction("prediction", token_ids, limits.max_model_len, limits.vocab_size)
        return tuple(token_ids)

    def _parsing(
        self, request: GenerationRequest, token_ids: Sequence[int]
    ) -> ParserOptions | None:
        if request.messages is None or self._chat_format is None:
            return None
        return parser_options(
            self._chat_format,
            request.tools,
            token_ids,
            self._tokenizer,
            request.template_variables,
        )

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        template_variables: Mapping[str, object] = MappingProxyType({}),
        add_special_tokens: bool = True,
        max_model_len: int,
    ) -> Sequence[int]:
        """Return the tokens of whichever prompt is set, with those of pictures. Raises
        InvalidRequestError for none, for several, and for text of which far more tokens come than
        the model takes.
        """
        pictures = pictures_of(messages)
        self._pictures.check(pictures)
        token_ids = await self._tokenize(
            text=text,
            messages=messages,
            token_ids=token_ids,
            tools=tools,
            template_variables=template_variables,
            add_special_tokens=add_special_tokens,
            max_model_len=max_model_len,
        )
        field = "prompt" if messages is None else "messages"
        return self._pictures.expand(token_ids, len(pictures), field=field)

    async def _tokenize(
        self,
        *,
        text: str | None,
        messages: Sequence[ChatMessage] | None,
        token_ids: Sequence[int] | None,
        tools: Sequence[dict[str, Any]],
        template_variables: Mapping[str, object],
        add_special_tokens: bool,
        max_model_len: int,
    ) -> Sequence[int]:
        if sum(prompt is not None for prompt in (text, messages, token_ids)) != 1:
            raise InvalidRequestError(
                "prompt needs exactly one of text, chat messages and token ids", field="prompt"
            )
        if text is not None:
            return await self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, max_tokens=max_model_len
            )
        if messages is not None:
            if not messages:
                raise InvalidRequestError("messages is empty, needs at least 1", field="messages")
            for message in messages:
                _check_role(message.role)
            return await self._tokenizer.encode_chat(
                messages, template_variables, tools=tools, max_tokens=max_model_len
            )
        return token_ids or ()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries."""
        return [self._tokenizer.backend.id_to_token(token_id) or "" for token_id in token_ids]

    async def detokenize(self, token_ids: Sequence[int], *, field: str = "token_ids") -> str:
        """Return the text of tokens, special tokens included. Unknown ids are refused, and more
        than MAX_RESUMED_TOKENS.
        """
        if len(token_ids) > MAX_RESUMED_TOKENS:
            raise InvalidRequestError(
                f"{field} has {len(token_ids)} tokens, at most {MAX_RESUMED_TOKENS}", field=field
            )
        validate_token_ids(field, token_ids, self._tokenizer.vocab_size)
        return await self._tokenizer.decode_any(token_ids)

    async def text_of_prompt(self, token_ids: Sequence[int], *, is_answered: bool) -> str:
        """Return the text of a prompt, special tokens included. An answer goes on with a character
        that the prompt only begins.
        """
        if is_answered:
            return await self._tokenizer.decode_prompt(token_ids)
        return await self._tokenizer.decode_any(token_ids)

    async def _bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word's tokens at the beginning of a text and behind a space, which many
        vocabularies have as part of the token.
        """
        if not words:
            return ()
        bare = [word.lstrip() or word for word in words]
        forms = await self._tokenizer.encode_words([*bare, *(f" {word}" for word in bare)])
        for token_ids in forms:
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words has a word of {len(token_ids)} tokens, at most "
                    f"{MAX_BAD_WORD_TOKENS}",
                    field="bad_words",
                )
        # A word may have one form only, or be nothing to the tokenizer.
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in forms if token_ids))

    def _cache_salt(self, request: ClientRequest) -> str | None:
        if not request.tenant or self._share_prefixes:
            return request.cache_salt
        # A client's own one has a character at least.
        return owned(request.tenant, request.cache_salt or "")

    def _deadline(self, wanted: float | None, arrival_time: float) -> float:
        if wanted is None:
            return arrival_time + self._default_deadline_s
        if wanted <= self._clock():
            raise DeadlineExceededError("the deadline passed before the request was taken")
        return min(wanted, arrival_time + self._max_deadline_s)


def _check_role(role: str) -> None:
    if role not in CHAT_ROLES:
        raise InvalidRequestError(
            f"messages has role {role[:64]!r}, must be one of {', '.join(CHAT_ROLES)}",
            field="messages",
        )


def _hashes_of_long(request: EngineCoreRequest, limits: ModelLimits) -> tuple[int, ...]:
    """Here, as long prompts are processed in another process."""
    is_long = len(request.prompt_token_ids) > MAX_UNHASHED_TOKENS
    return prefix_hashes(request, limits.block_size) if is_long else ()


def _check_rank(rank: int | None, limits: ModelLimits) -> None:
    if rank is not None and rank >= limits.data_parallel_size:
        raise InvalidRequestError(
            f"data_parallel_rank is {rank}, must be 0 to {limits.data_parallel_size - 1}",
            field="data_parallel_rank",
        )


def _session(request: ClientRequest) -> str:
    return owned(request.tenant, request.session) if request.session else ""


def _check_request(request: ClientRequest) -> None:
    validate_request_id(request.request_id)
    validate_priority(request.priority)
    salt = request.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters, must be 1 to {MAX_CACHE_SALT_CHARS}",
            field="cache_salt",
        )
