"""The decisions of the Redis store: Lua that one call runs as a whole. database.py says which keys there are.

Each script begins with what all have in common; KEYS[1] is the account's key (or another first one, where it says so)
and ARGV[1] the time in microseconds, 0 for Redis' own.
"""

import functools
import hashlib
from typing import Final

from tenants.records.holds import DenialReason
from tenants.records.leases import LEASE_PREFIX, LeaseState
from tenants.records.limits import MINUTE_US
from tenants.records.usage import DAY_US, EXPIRED, MICRO
from tenants.store.protocol import OTHER_TAGS, RETENTION_DAYS, TAGGED_MAX

FIELD_SEPARATOR: Final = "\x1f"  # the parts of a field of usage
GAUGE_S: Final = 86_400  # a token's or class's gauge is kept so long after its last request began
SWEEP_MAX: Final = 500  # holds that one call expires

# A record is a msgpack array made by UsageRecord: 4 micro_neurons, 5 prompt_tokens, 6 cached_tokens,
# 7 completion_tokens, 8 outcome, 9 token_id, 10 model, 14 subjects, 15 tags (Lua counts from 1). Scripts move its bytes
# and read these.
COMMON: Final = f"""
local account, now = KEYS[1], tonumber(ARGV[1])
if now == 0 then
    local time = redis.call('TIME')
    now = time[1] * {MICRO} + time[2]
end
local holds, expiries = account .. ':holds', account .. ':expiries'
local sums = {{'requests', 'micro_neurons', 'prompt_tokens', 'cached_tokens', 'completion_tokens', 'held', 'open'}}

local function gauge(subject) return account .. ':gauge:' .. subject end

-- The calendar is that of Howard Hinnant's "chrono-compatible low-level date algorithms".
local function first_of_month(day)
    local z = day + 719468
    local doe = z - math.floor(z / 146097) * 146097
    local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
    local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
    return day - (doy - math.floor((153 * math.floor((5 * doy + 2) / 153) + 2) / 5))
end

local function key_of(kind, day, subject)
    local key = account .. kind .. day
    if subject == '' then return key end
    return key .. ':' .. subject
end

local function day_key(day, subject) return key_of(':day:', day, subject) end

local function month_key(day, subject) return key_of(':month:', first_of_month(day), subject) end

local function spend(day, subject, micro_neurons)
    local key = month_key(day, subject)
    if micro_neurons ~= 0 and redis.call('EXISTS', key) == 1 then
        redis.call('INCRBY', key, string.format('%.0f', micro_neurons))
    end
end

local function is_lease(subject) return string.sub(subject, 1, {len(LEASE_PREFIX)}) == '{LEASE_PREFIX}' end

-- What a call holds, used and gives back of a lease: changes of `sums`.
local function charge_lease(subject, changes)
    local key = account .. ':' .. subject
    if redis.call('EXISTS', key) == 0 then return end
    for i = 3, 5 do
        if changes[i] ~= 0 then redis.call('HINCRBY', key, sums[i], changes[i]) end
    end
    redis.call('HINCRBY', key, 'used', string.format('%.0f', changes[2] + changes[6]))
    redis.call('HINCRBY', key, 'open', changes[7])
end

local function counted(subjects)
    local names = {{''}}
    for subject in string.gmatch(subjects or '', '[^\\n]+') do names[#names + 1] = subject end
    return names
end

-- Adds to the numbers of a hash in two calls, whatever their count; a day's key that is new gets its end.
local function add(key, names, changes, day)
    local before, written = redis.call('HMGET', key, unpack(names)), {{}}
    for i, name in ipairs(names) do
        written[2 * i - 1], written[2 * i] = name, string.format('%.0f', tonumber(before[i] or 0) + changes[i])
    end
    redis.call('HSET', key, unpack(written))
    if day and not before[1] then redis.call('EXPIREAT', key, (day + {RETENTION_DAYS}) * 86400) end
end

local function take(request)
    local hold = redis.call('HGET', holds, request)
    if not hold then return nil end
    redis.call('HDEL', holds, request)
    redis.call('ZREM', expiries, request)
    local day, held, output, rates, record = string.match(hold, '^(%d+):(%d+):(%d+):([%d,]*):(.*)$')
    if not day then  -- one of the first version
        output, rates, day, held, record = 0, '', string.match(hold, '^(%d+):(%d+):(.*)$')
    end
    return {{day = day, held = tonumber(held), output = tonumber(output), rates = rates, record = record}}
end

local function give_back(record, subjects, hold)
    local at = 0
    for rate in string.gmatch(hold.rates, '%d+') do
        at = at + 1
        local key = gauge(subjects[at])
        if not is_lease(subjects[at]) then add(key, {{'open', 'output'}}, {{-1, -hold.output}}) end
        if rate ~= '0' and record[7] > 0 then
            local lasts = math.ceil(record[7] * {MINUTE_US} / tonumber(rate))
            local before = tonumber(redis.call('HGET', key, 'output_us') or 0)
            redis.call('HSET', key, 'output_us', math.max(before, now) + lasts)
        end
    end
end

-- The field of usage that a record is summed in.
local function kind_of(usage, record)
    local field = record[9] .. '{FIELD_SEPARATOR}' .. record[10]
    if (record[15] or '') == '' then return field end
    local tagged = field .. '{FIELD_SEPARATOR}' .. record[15]
    if redis.call('HEXISTS', usage, tagged) == 1 or redis.call('HLEN', usage) < {TAGGED_MAX} then return tagged end
    return field .. '{FIELD_SEPARATOR}{OTHER_TAGS}'
end

local function write(request, day, hold, bytes)
    local ledger = account .. ':ledger:' .. day
    local record, before = cmsgpack.unpack(bytes), redis.call('HGET', ledger, request)
    local changes = {{0, 0, 0, 0, 0, hold and -hold.held or 0, hold and -1 or 0}}
    local old = before and cmsgpack.unpack(before) or {{0, 0, 0, 0, 0, 0, 0, '{EXPIRED}'}}
    if old[8] == '{EXPIRED}' then
        if not before then changes[1] = 1 end
        for i = 4, 7 do changes[i - 2] = record[i] - old[i] end
        redis.call('HSET', ledger, request, bytes)
        local usage = account .. ':usage:' .. day
        local field = kind_of(usage, record)
        local sum, written = redis.call('HGET', usage, field), {{}}
        local i = 0
        for number in string.gmatch(sum or '0:0:0:0:0', '%d+') do
            i = i + 1
            written[i] = string.format('%.0f', tonumber(number) + changes[i])
        end
        redis.call('HSET', usage, field, table.concat(written, ':'))
        if not sum then  -- the day's first of its kind
            redis.call('EXPIREAT', usage, (day + {RETENTION_DAYS}) * 86400)
            redis.call('EXPIREAT', ledger, (day + {RETENTION_DAYS}) * 86400)
        end
    end
    local subjects = counted(record[14])
    for _, subject in ipairs(subjects) do
        if is_lease(subject) then
            charge_lease(subject, changes)
        else
            add(day_key(day, subject), sums, changes, day)
            spend(day, subject, changes[2] + changes[6])
        end
    end
    if hold then give_back(record, subjects, hold) end
end

local function expire()
    local due = redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, {SWEEP_MAX})
    for _, request in ipairs(due) do
        local hold = take(request)
        write(request, hold.day, hold, hold.record)
    end
    return #due
end
"""

# SubjectUsage and remaining() of decision.py.
_MEASURE: Final = f"""{COMMON}
local today = math.floor(now / {DAY_US})

-- The caps as Python packed them.
local function read_caps(packed)
    local caps = {{}}
    for i, cap in ipairs(cmsgpack.unpack(packed)) do
        caps[i] = {{subject = cap[1], measure = cap[2], allowed = cap[4], min_amount = cap[5], cost = cap[6],
            room = cap[7]}}
    end
    return caps
end

local function spent(day, subject)
    local columns = redis.call('HMGET', day_key(day, subject), 'micro_neurons', 'held')
    return tonumber(columns[1] or 0) + tonumber(columns[2] or 0)
end

local function spent_this_month(subject)
    local stored, sum = redis.call('GET', month_key(today, subject)), 0
    if stored then return tonumber(stored) end
    for day = first_of_month(today), today do sum = sum + spent(day, subject) end
    return sum
end

local function keep_month(subject, sum)
    local key = month_key(today, subject)
    if redis.call('SETNX', key, string.format('%.0f', sum)) == 1 then
        redis.call('EXPIREAT', key, (today + {RETENTION_DAYS}) * 86400)
    end
end

local gauges = {{}}
local function used(subject)
    if not gauges[subject] then
        local names = {{'requests_us', 'input_us', 'output_us', 'output', 'open'}}
        local columns, read = redis.call('HMGET', gauge(subject), unpack(names)), {{}}
        for i, name in ipairs(names) do read[name] = tonumber(columns[i] or 0) end
        gauges[subject] = read
    end
    return gauges[subject]
end

local function is_budget(cap)
    return cap.measure == '{DenialReason.NEURONS_PER_DAY}' or cap.measure == '{DenialReason.NEURONS_PER_MONTH}'
end

local function lease_left(subject)
    local row = redis.call('HMGET', account .. ':' .. subject, 'state', 'until_us', 'amount', 'used')
    if row[1] ~= '{LeaseState.OPEN}' or now >= tonumber(row[2]) then return -1 end
    return tonumber(row[3]) - tonumber(row[4])
end

local function left(cap)
    if cap.measure == '{DenialReason.LEASE}' then return lease_left(cap.subject) end
    local measure, read = cap.measure, used(cap.subject)
    if measure == '{DenialReason.NEURONS_PER_DAY}' then return cap.allowed - spent(today, cap.subject) end
    if measure == '{DenialReason.NEURONS_PER_MONTH}' then return cap.allowed - spent_this_month(cap.subject) end
    if measure == '{DenialReason.CONCURRENT_REQUESTS}' then return cap.allowed - read.open end
    if measure == '{DenialReason.REQUESTS_PER_MINUTE}' then return cap.room - math.max(read.requests_us - now, 0) end
    if measure == '{DenialReason.INPUT_TOKENS_PER_MINUTE}' then return cap.room - math.max(read.input_us - now, 0) end
    return cap.room - math.max(read.output_us - now, 0) - math.ceil(read.output * {MINUTE_US} / cap.allowed)
end
"""


DENIAL_REASONS: Final = list(DenialReason)
DENIAL_CODES: Final = {reason: number for number, reason in enumerate(DENIAL_REASONS, 1)}
_LUA_CODES: Final = ", ".join(f"{reason} = {code}" for reason, code in DENIAL_CODES.items())

# ARGV: now, request, token, held, lifetime, record, output, subjects, then the caps. The steps are those of reserve()
# in sqlite/quotas.py and of decide() in decision.py.
RESERVE: Final = f"""{_MEASURE}
local request, token, held, lifetime, record = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local output, subjects, caps = tonumber(ARGV[7]), counted(ARGV[8]), read_caps(ARGV[9])
local codes = {{{_LUA_CODES}}}
local known = redis.call('HMGET', account, 'created_at', 'suspended_at')
expire()
if not known[1] then return {{codes.{DenialReason.NO_ACCOUNT}}} end
if redis.call('HEXISTS', account .. ':revoked', token) == 1 then return {{codes.{DenialReason.REVOKED}}} end
if known[2] then return {{codes.{DenialReason.SUSPENDED}}} end
local hold = redis.call('HGET', holds, request)
if hold then
    local day, amount = string.match(hold, '^(%d+):(%d+):')
    local granted = {{0, tonumber(day), tonumber(amount)}}
    for _, cap in ipairs(caps) do granted[#granted + 1] = left(cap) end
    return granted
end
local recorded = redis.call('HGET', account .. ':ledger:' .. today, request)
if recorded and cmsgpack.unpack(recorded)[8] ~= '{EXPIRED}' then return {{codes.{DenialReason.RECORDED}}} end

local granted, after = held, {{}}
for i, cap in ipairs(caps) do
    local room, measure = left(cap), cap.measure
    local in_use = cap.allowed - room
    after[i] = room
    if is_budget(cap) or measure == '{DenialReason.LEASE}' then
        if room < cap.min_amount then
            local ends = today + 1
            if measure == '{DenialReason.LEASE}' then
                return {{codes[measure], {MICRO}, cap.allowed, in_use, cap.subject}}
            end
            if measure == '{DenialReason.NEURONS_PER_MONTH}' then ends = first_of_month(first_of_month(today) + 31) end
            return {{codes[measure], ends * {DAY_US} - now, cap.allowed, in_use, cap.subject}}
        end
        granted = math.min(granted, room)
    elseif measure == '{DenialReason.CONCURRENT_REQUESTS}' then
        if room <= 0 then return {{codes[measure], {MICRO}, cap.allowed, in_use, cap.subject}} end
    elseif cap.cost > room then
        return {{codes[measure], cap.cost - room, cap.allowed, 0, cap.subject}}
    end
end

local rates = {{}}
local function take_of(i, subject)
    local key, read = gauge(subject), used(subject)
    local written = {{'open', read.open + 1, 'output', read.output + output}}
    for j, cap in ipairs(caps) do
        if cap.subject == subject then
            if cap.measure == '{DenialReason.REQUESTS_PER_MINUTE}' then
                written[#written + 1], written[#written + 2] = 'requests_us', math.max(read.requests_us, now) + cap.cost
            elseif cap.measure == '{DenialReason.INPUT_TOKENS_PER_MINUTE}' then
                written[#written + 1], written[#written + 2] = 'input_us', math.max(read.input_us, now) + cap.cost
            elseif cap.measure == '{DenialReason.OUTPUT_TOKENS_PER_MINUTE}' then
                rates[i] = cap.allowed
            elseif cap.measure == '{DenialReason.NEURONS_PER_MONTH}' then
                keep_month(subject, cap.allowed - after[j])
            end
        end
    end
    redis.call('HSET', key, unpack(written))
    if subject ~= '' then redis.call('EXPIRE', key, {GAUGE_S}) end
    add(day_key(today, subject), {{'held', 'open'}}, {{granted, 1}}, today)
    spend(today, subject, granted)
end
for i, subject in ipairs(subjects) do
    rates[i] = 0
    if is_lease(subject) then
        charge_lease(subject, {{0, 0, 0, 0, 0, granted, 1}})
    else
        take_of(i, subject)
    end
end
local terms = string.format('%.0f:%.0f:%.0f:%s:', today, granted, output, table.concat(rates, ','))
redis.call('HSET', holds, request, terms .. record)
redis.call('ZADD', expiries, now + lifetime, request)
local answer = {{0, today, granted}}
for i, cap in ipairs(caps) do
    local taken = (is_budget(cap) or cap.measure == '{DenialReason.LEASE}') and granted or cap.cost
    if cap.measure == '{DenialReason.CONCURRENT_REQUESTS}' then taken = 1 end
    answer[i + 3] = after[i] - taken
end
return answer
"""

# ARGV: now, then the caps, of requests per minute alone.
COUNT: Final = f"""{_MEASURE}
local caps = read_caps(ARGV[2])
local codes = {{{_LUA_CODES}}}
for _, cap in ipairs(caps) do
    local room = left(cap)
    if cap.cost > room then return {{codes[cap.measure], cap.cost - room, cap.allowed, 0, cap.subject}} end
end
for _, cap in ipairs(caps) do
    redis.call('HSET', gauge(cap.subject), 'requests_us', math.max(used(cap.subject).requests_us, now) + cap.cost)
    if cap.subject ~= '' then redis.call('EXPIRE', gauge(cap.subject), {GAUGE_S}) end
end
return {{0}}
"""

# ARGV: now, then the caps.
REMAINING: Final = f"""{_MEASURE}
local rests = {{}}
for i, cap in ipairs(read_caps(ARGV[2])) do rests[i] = left(cap) end
return rests
"""

# ARGV: now, lifetime, then request, record of each.
CHECKPOINT: Final = f"""{COMMON}
for i = 3, #ARGV, 2 do
    local hold = redis.call('HGET', holds, ARGV[i])
    local terms = hold and string.match(hold, '^%d+:%d+:%d+:[%d,]*:')
    if terms then
        redis.call('HSET', holds, ARGV[i], terms .. ARGV[i + 1])
        redis.call('ZADD', expiries, now + tonumber(ARGV[2]), ARGV[i])
    end
end
"""

# ARGV: now, whether an account that is not there may be charged, then request, day, record of each.
SETTLE: Final = f"""{COMMON}
if ARGV[2] == '0' and redis.call('EXISTS', account) == 0 then return 0 end
for i = 3, #ARGV, 3 do
    local hold = take(ARGV[i])
    write(ARGV[i], hold and hold.day or ARGV[i + 1], hold, ARGV[i + 2])
end
return 1
"""

# ARGV: now, then request, day, held, output, rates, lifetime, record of each: holds that were granted, and that this
# primary may have lost. Nothing is compared. Rates of requests and of prompts are not counted again: what was granted
# lately would hold up what comes now.
RESTATE: Final = f"""{COMMON}
if redis.call('EXISTS', account) == 0 then return 0 end
for i = 2, #ARGV, 7 do
    local request, day, held, output, rates, lifetime, record = unpack(ARGV, i, i + 6)
    local recorded = redis.call('HGET', account .. ':ledger:' .. day, request)
    local held_already = redis.call('HEXISTS', holds, request) == 1
    if held_already or not recorded or cmsgpack.unpack(recorded)[8] == '{EXPIRED}' then
        if not held_already then
            for _, subject in ipairs(counted(cmsgpack.unpack(record)[14])) do
                if is_lease(subject) then
                    charge_lease(subject, {{0, 0, 0, 0, 0, tonumber(held), 1}})
                else
                    add(gauge(subject), {{'open', 'output'}}, {{1, tonumber(output)}})
                    if subject ~= '' then redis.call('EXPIRE', gauge(subject), {GAUGE_S}) end
                    add(day_key(day, subject), {{'held', 'open'}}, {{tonumber(held), 1}}, day)
                    spend(day, subject, tonumber(held))
                end
            end
        end
        redis.call('HSET', holds, request, table.concat({{day, held, output, rates, record}}, ':'))
        redis.call('ZADD', expiries, now + tonumber(lifetime), request)
    end
end
return 1
"""

SWEEP: Final = f"{COMMON}return expire()"

# ARGV: now, first day, last day. Returns the days of them that have usage, and how many sums each has.
USAGE_DAYS: Final = f"""{COMMON}
local days = {{}}
for day = ARGV[2], ARGV[3] do
    local count = redis.call('HLEN', account .. ':usage:' .. string.format('%.0f', day))
    if count > 0 then days[#days + 1] = {{day, count}} end
end
return days
"""

# ARGV: now, seq, entry.
APPEND_AUDIT: Final = f"""{COMMON}
if redis.call('LLEN', account .. ':audit') ~= tonumber(ARGV[2]) - 1 then return 0 end
redis.call('RPUSH', account .. ':audit', ARGV[3])
return 1
"""

# KEYS: hearth:notices. ARGV: now, due before, due again at, limit.
CLAIM_NOTICES: Final = f"""{COMMON}
local taken = {{}}
for i, id in ipairs(redis.call('ZRANGEBYSCORE', account, '-inf', ARGV[2], 'LIMIT', 0, ARGV[4])) do
    redis.call('ZADD', account, ARGV[3], id)
    taken[2 * i - 1] = redis.call('HGET', account .. ':bodies', id)
    taken[2 * i] = redis.call('HINCRBY', account .. ':tries', id, 1) - 1
end
return taken
"""


@functools.cache
def digest(script: str) -> str:
    """The name that Redis knows a script by."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
