"""A stand-in for vLLM with memory, a scheduler and vLLM's ways of failing; all on virtual time.

From flags to figures:

- `profiles`: devices and models.
- `settings` (by `flag_values`, `effective_values`, `config_rules`, `refusals`): flags -> values
  in effect, or vLLM's refusal.
- `memory` (by `memory_needs`, `memory_cuda`, `memory_cpu`, `kv_fit`): values -> blocks of KV
  cache, or out of memory.
- `engine` (by `scheduler`, `requests`, `blocks`, `step_time`, `noise`, `counters`): requests ->
  steps on a virtual clock.
- `words` (by `words_start`, `words_failure`, `log_format`, `timeline`, `sizes`): what vLLM would
  write into its log.
- `virtual` (by `virtual_client`): a configuration under a workload, without a server.
- `calibrate`: a device profile from what a real machine did.
- `server`: all of it behind vLLM's command line and HTTP.
"""
