"""What a newcomer of an elastic group loads before its first step, and how it comes from a member that is ahead."""
