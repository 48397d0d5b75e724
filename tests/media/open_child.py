"""The real child, as it would be where the machine allows neither a network namespace nor seccomp."""

import pipeline.media.sandbox_child as child

if __name__ == "__main__":
    child.isolation.leave_network = lambda: ()
    child.isolation.restrict_system_calls = lambda: False
    child.main()
