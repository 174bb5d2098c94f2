"""What `--help` says of the commands whose modules load jax, which help does not."""

CONVERT_DETAILS = """\
SOURCE is one of
  a Hugging Face folder: config.json, *.safetensors (one file, or several and an index), tokenizer
  a GGUF file, dequantised to float32 unless --dtype says otherwise
  a run folder, of which the newest checkpoint is taken
  with --to hf, a folder that this command made, or a run folder

DESTINATION is a new folder. For training, name it as --run.init-from, and in the config file
write model=models.config.read_config(DESTINATION).
"""

GENERATE_DETAILS = """\
CHECKPOINT is a folder that spade-jax convert made, or a run folder, of which the newest checkpoint
is taken.

Without --prompts, type one message a line; replies appear as they are sampled, control characters
escaped. /new begins a new conversation; Ctrl-C ends a reply; /quit or Ctrl-D leaves.

--prompts FILE holds a JSON object a line, with one of
  "text"      completed as it is, or with --chat answered as a user's message
  "tokens"    token ids, completed as they are
  "messages"  [{"role": "user", "content": ...}, ...] with assistant in turn; a system message may
              come first; answered
Before a text that is completed stands the token that begins every sequence of the model, if it has
one. A control token that is spelt in a text is ordinary text.

--out FILE gets a line for each prompt, in their order: {"text", "tokens", "logprobs", "stop"}.
"logprobs" are under the distribution sampled from; "stop" is stop_id (the end of a turn or text,
which is the last token), stop_string (the last token completes it), max_tokens, context (full),
cancelled (Ctrl-C; what there is) or error, with what it was under "error". A line depends on its
prompt, its place in the file, --seed and the options, not on the other lines.

Exit codes: 0 done, 1 a prompt ended in an error, 2 bad input, 130 interrupted.
"""
