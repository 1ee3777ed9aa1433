"""What SGLang's plugin entry point calls, in every process of a server, whether ADAFLASH is asked for or not."""

from adasim.real.sglang_plugin import contract, cpu


def register() -> None:
    """Register the algorithm ADAFLASH, and the CPU's hooks where the environment asks for them.

    SGLang logs a plugin's error and goes on. So versions, arguments and settings are checked when the algorithm is
    chosen, where an error ends the start. An SGLang too different even for this leaves ADAFLASH unknown, which ends the
    start as well; the log has the reason.

    Raises:
        InputError: this SGLang cannot be registered with: both versions, and what differs.
    """
    try:
        if cpu.asked_for():
            cpu.install()
        from adasim.real.sglang_plugin.algorithm import register as register_algorithm

        register_algorithm()
    except Exception:
        contract.check()
        raise
