-- Nodes: what is known of each, the lease, and what becomes of one that is silent.
--
-- NODES  members 'N' node (live, by the end of its lease), 'D' node (dead, by 0, until all of its is back),
--        'T' node (detached, until its number is forgotten)
-- CALLS  node -> number of its last call, session, grants pushed and acknowledged, tickets waiting, the recovery it restated in

local known, touched = {}, {}

local function read_node(node)
    local entry = known[node]
    if entry == nil then
        local packed = call('HGET', CALLS, node)
        entry = false
        if packed then
            entry = {}
            entry.number, entry.session, entry.pushed, entry.acked, entry.waiting, entry.restated =
                unpack_from('>I8I8I8I8I8I8', packed)
        end
        known[node] = entry
    end
    return entry
end

local function write_node(node)
    touched[node] = true
end

local function forget_node(node)
    known[node], touched[node] = false, nil
    st.calls = st.calls - call('HDEL', CALLS, node)
end

local living = {}
local function is_live(node)
    local live = living[node]
    if live == nil then
        local lease_end = call('ZSCORE', NODES, 'N' .. node)
        live = lease_end and tonumber(lease_end) > st.clock or false
        living[node] = live
    end
    return live
end

local function add_waiting(node, n)
    local entry = known[node] or read_node(node)
    if entry then
        entry.waiting = entry.waiting + n
        touched[node] = true
    end
end

local function save_nodes()
    local fields = {}
    for node in pairs(touched) do
        local e = known[node]
        fields[#fields + 1] = node
        fields[#fields + 1] = pack('>I8I8I8I8I8I8', e.number, e.session, e.pushed, e.acked, e.waiting, e.restated)
    end
    if #fields > 0 then
        st.calls = st.calls + call('HSET', CALLS, unpack(fields))
    end
end

local function forget_outbox(node)
    st.outbox = st.outbox - call('ZREMRANGEBYLEX', OUTBOX, '[' .. node, '(' .. node .. '\255')
end

local function die(node) -- first the entry, so that it can do nothing more, then what it held, in portions
    st.nodes = st.nodes - call('ZREM', NODES, 'N' .. node) + call('ZADD', NODES, 0, 'D' .. node)
    st.live, st.membership = st.live - 1, st.membership + 1
    living[node] = false
end
