use super::*;
use crate::Hook::{Forward, Input};

fn chain_of(family: Family, table: &str, name: &str, hook: Hook, drops: bool) -> Chain {
    Chain { family, table: table.into(), name: name.into(), hook: Some(hook), drops }
}

fn pods() -> Vec<Net> {
    ["10.42.0.0/16", "fd42::/56"].map(|net| net.parse().unwrap()).into()
}

fn source(address: &[u8], mask: &[u8]) -> Part {
    let offset = if address.len() == 4 { 12 } else { 8 };
    Part::Header { offset, mask: mask.into(), value: address.into() }
}

#[track_caller]
fn check(chain: &Chain, rules: &[Vec<Part>], has_chain: bool, expected: &str) {
    let numbered = rules.iter().zip(1..).map(|(parts, handle)| Rule { handle, parts: parts.clone() });
    let step = match plan(chain, &numbered.collect::<Vec<_>>(), has_chain, &pods()) {
        Step::Nothing => "nothing".to_owned(),
        Step::Accept { has_jump } => format!("accept, has jump: {has_jump}"),
        Step::Report(obstacle) => obstacle.to_string(),
    };
    assert_eq!(step, expected);
}

#[test]
fn accepts_pods_in_chains_of_iptables_and_firewalld_that_may_drop() {
    let jump = |chain: &str| vec![Part::Neutral, Part::Verdict(Verdict::Jump(chain.into()))];
    let forward = chain_of(Family::Ip, "filter", "FORWARD", Forward, true);
    check(&forward, &[], false, "accept, has jump: false");
    check(&forward, &[jump("DOCKER-USER")], false, "accept, has jump: false");
    check(&forward, &[jump("SKIFF-FORWARD")], false, "accept, has jump: true");
    check(&forward, &[jump("DOCKER-USER"), jump("SKIFF-FORWARD")], true, "nothing");
    check(&forward, &[jump("DOCKER-USER")], true, "accept, has jump: false");
    let open = Chain { drops: false, ..forward.clone() };
    check(&open, &[], false, "nothing");
    check(&open, &[jump("DOCKER-USER")], false, "accept, has jump: false");
    let firewalld = chain_of(Family::Inet, "firewalld", "filter_INPUT", Input, false);
    check(&firewalld, &[vec![Part::Reject]], false, "accept, has jump: false");
    check(&firewalld, &[jump("SKIFF-INPUT"), vec![Part::Reject]], true, "nothing");
}

#[test]
fn reports_chains_of_others_that_drop() {
    let chain = chain_of(Family::Inet, "admin", "forward", Forward, true);
    let policy = "table inet admin, chain forward: the policy drops packets of pods";
    check(&chain, &[], false, policy);
    check(&chain, &[vec![Part::Condition, Part::Verdict(Verdict::Accept)]], false, policy);
    let (v4, v6) = (source(&[10, 42, 0, 0], &[255, 255, 0, 0]), source(&[0xfd, 0x42], &[255, 255]));
    let accept = |part: &Part| vec![part.clone(), Part::Neutral, Part::Verdict(Verdict::Accept)];
    check(&chain, &[accept(&v4)], false, policy);
    check(&chain, &[accept(&v4), accept(&v6)], false, "nothing");
    let in_inet = [vec![Part::Family(Ip::V4)], accept(&v4)].concat();
    check(&chain, &[in_inet, accept(&v6)], false, "nothing");
    check(&chain, &[vec![Part::Family(Ip::V4), Part::Verdict(Verdict::Accept)]], false, policy);
    let narrow = source(&[10, 42, 1, 0], &[255, 255, 255, 0]);
    check(&chain, &[accept(&narrow), accept(&v6)], false, policy);
    let open = Chain { drops: false, ..chain };
    check(&open, &[], false, "nothing");
    check(&open, &[vec![Part::Condition, Part::Reject]], false, "nothing");
    let rule = "table inet admin, chain forward: the rule with handle 2 drops packets of pods";
    check(&open, &[accept(&v4), vec![Part::Neutral, Part::Reject], accept(&v6)], false, rule);
    check(&open, &[accept(&v4), accept(&v6), vec![Part::Verdict(Verdict::Drop)]], false, "nothing");
    // One family is no business of a table of the other.
    let v4_only = chain_of(Family::Ip, "admin", "input", Input, true);
    check(&v4_only, &[accept(&v4)], false, "nothing");
}

#[test]
fn only_filters_on_the_way_to_and_from_pods_matter() {
    let chain = chain_of(Family::Inet, "skiff", "filter-forward", Forward, false);
    assert!(!chain.is_filter("skiff"));
    assert!(Chain { family: Family::Ip, ..chain.clone() }.is_filter("skiff"));
    assert!(!Chain { hook: None, table: "x".into(), ..chain.clone() }.is_filter("skiff"));
    assert!(!Chain { hook: Some(Hook::Output), table: "x".into(), ..chain }.is_filter("skiff"));
}
