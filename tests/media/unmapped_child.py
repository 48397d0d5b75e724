"""The real child, on a machine where it reads its libraries by rights that a namespace of users takes away."""

import pipeline.media.sandbox_child as child


def leave_network() -> tuple[str, ...]:
    def fail() -> None:
        raise PermissionError("libraries of somebody else")

    child._warm_up = fail
    return ("network_namespace",)


if __name__ == "__main__":
    child.isolation.leave_network = leave_network
    child.main()
