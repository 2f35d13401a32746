"""The shares of ignored tokens that calls plan with."""


def expected_shares(monkeypatch, module):
    """Returns a list to which every plan's request adds its expected_ignored. module: logitless.torch._engine or
    logitless.jax._ffi."""
    seen, request_of = [], module.request_of

    def spy(options):
        made = request_of(options)
        seen.append(made.expected_ignored)
        return made

    monkeypatch.setattr(module, "request_of", spy)
    return seen
