from omnidraft_npu.plots import title_of


def test_a_title_names_every_device_that_took_part():
    """A simulated drafter must never be read as an NPU, nor the target's device as its own."""
    environment = {
        "target": {"name": "big", "precision": "int8"},
        "drafter": {"name": "small"},
        "proposer": "model",
        "temperature": 0.0,
        "target_provider": "CPUExecutionProvider",
        "draft_provider": "CPUExecutionProvider",
    }
    assert title_of(environment) == "small drafts for big, int8, greedy, on CPUExecutionProvider"
    simulated = "QNNExecutionProvider (simulated HTP, soc 60)"
    title = title_of(environment | {"draft_provider": simulated})
    assert title.endswith(f"on CPUExecutionProvider, drafter on {simulated}")
    alone = environment | {"drafter": None, "draft_provider": None, "proposer": "lookup"}
    assert title_of(alone).endswith("greedy, on CPUExecutionProvider")
