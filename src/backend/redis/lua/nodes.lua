-- Nodes: what is known of each, the lease, and what becomes of one that is silent.
--
-- NODES  members 'N' node (live, by the end of its lease), 'D' node (dead, by 0, until all of its is back),
--        'T' node (detached, until its number is forgotten)
-- CALLS  node -> number of its last call, session, grants pushed and acknowledged, tickets waiting, the recovery it restated in, whether it is live

local known, touched = {}, {}
local living = {}

function q.read_node(node)
    local entry = known[node]
    if entry == nil then
        local packed = call('HGET', CALLS, node)
        entry = false
        if packed then
            entry = {}
            entry.number, entry.session, entry.pushed, entry.acked, entry.waiting, entry.restated, entry.live =
                unpack_from('>I8I8I8I8I8I8B', packed)
        end
        known[node] = entry
    end
    return entry
end

function q.write_node(node)
    touched[node] = true
end

function q.add_waiting(node, n)
    local entry = known[node] or q.read_node(node)
    if entry then
        entry.waiting = entry.waiting + n
        touched[node] = true
    end
end

function q.save_nodes()
    local fields = {}
    for node in pairs(touched) do
        local e = known[node]
        fields[#fields + 1] = node
        fields[#fields + 1] = pack('>I8I8I8I8I8I8B', e.number, e.session, e.pushed, e.acked, e.waiting, e.restated, e.live)
    end
    if #fields > 0 then
        st.calls = st.calls + call('HSET', CALLS, unpack(fields))
    end
end
