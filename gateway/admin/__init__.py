"""Operations for account administrators and operators."""
