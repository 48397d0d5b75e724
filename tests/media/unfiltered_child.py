"""The hostile child as it would be where there is no seccomp."""

from tests.media import hostile_child

if __name__ == "__main__":
    hostile_child.main(filtered=False)
