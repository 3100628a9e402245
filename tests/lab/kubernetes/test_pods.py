"""Runs in real pods: they train, and what becomes of them when workers, pods, nodes and clients go."""


def test_two_pods_train_with_the_rights_of_the_page(bench):
    run = bench.start()
    bench.wait_up()
    assert {bench.rank(0)["host"], bench.rank(1)["host"]} == {"r-0", "r-1"}
    bench.stop()
    assert bench.end(run) == 0
    assert bench.result()["state"] == "succeeded"
    assert "attempt 0 of 2 ranks begins at step 0" in bench.said
    assert not bench.user.objects("jobs.batch,services,secrets")
