"""The text our small tokenizers are learned on: prose, words, code, chat, JSON, numbers, other scripts.

Changing one character changes the tokenizer of every checkpoint that `k3 make-checkpoint` writes.
"""

PROSE = """\
The lighthouse keeper wrote one line in the book every evening. She wrote the time, the wind, and the name
of every ship that she could see from the window. Most days the line was short. On the day of the great
storm it filled two pages, and the last words could not be read because the ink had run.

A river does not hurry, and yet it arrives. It takes what the mountains give it, a little sand, a little
snow, and it carries all of this down to the sea without asking where the sea is. When people build a bridge
over the river they think about the river for a year, and then they think only about the bridge.

Every morning my brother asks the same question: what would you do if you had another hour? I say that I
would sleep. He says that he would read, but I have never seen him finish a book. Last week he bought three
more. He put them on the table beside the window, where they look very good, and that is where they will
stay.

How does a computer read a sentence? First it cuts the text into small pieces. Then it looks up a number for
each piece, and from then on it works only with numbers. A model is shown the first part of a text and has
to guess the next piece. It is told how wrong the guess was, and it changes itself a little, so that the
next guess will be better. After this has happened many millions of times the guesses become good, and
people start to say that the machine understands. Perhaps it does; perhaps it only remembers. Nobody has
found a test which everyone accepts, and that is why the question is still interesting.

"Don't open the door," she said. "It's cold, and I'm not dressed." But he'd already opened it. They're still
arguing about who should have closed it. We've heard both sides, and we'll hear them again. You can't win,
and you shouldn't try; it isn't worth the trouble. That's what friends are for, I suppose.

To make bread you need flour, water, salt and time. Mix the flour with the water and wait. Add the salt,
fold the dough, and wait again. Heat the oven as far as it will go. Bake the loaf until it sounds hollow
when you knock on it. Let it cool before you cut it, even though this is the hardest part. The first loaf
may be flat. The second will be better, and by the tenth you will no longer need the recipe.

The capital of France is Paris. The capital of Norway is Oslo. The capital of Japan is Tokyo. The capital of
Kenya is Nairobi. The capital of Peru is Lima. Water boils at 100 degrees and freezes at 0. There are seven
days in a week, twelve months in a year, and sixty seconds in a minute. The sun rises in the east and sets
in the west. Two and two make four; three times five is fifteen; half of ten is five.

Hello! How are you today? I am fine, thank you. Could you please tell me the way to the station? Of course:
go straight on, turn left at the second street, and you will see it on the right. Thank you very much. You
are welcome. Good morning, good evening, good night. See you tomorrow. Please write a short story about a
cat. Once upon a time there was a small grey cat who lived in an old house by the sea. Explain this to me as
if I were five years old. Here is a summary of the main points. First, second, third, finally. However,
therefore, because.
"""

WORDS = """\
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my now
over such our man me even most made after also did many off before must well back through years much where
your way down should because long each just state those people too mister how little good world make very
year still see work life men day get here between both being under three never know same last another while
us might great go come since against right came take used himself few house use place during high without
again home around small however found general part school upon water number room night hand head point
second system group set always better best young today began feeling light power field line order course
problem business program question information service development government policy company history result
different important possible several large early order social public national international university
president country children example language change word letter number answer sentence paragraph story reason
think thought response message user assistant system model token cache page slot state step layer expert
router weight tensor shape index batch request server client stream prompt prefix draft verify accept reject
budget chunk prefill decode memory device kernel compile graph pass pattern rewrite match proof report check
error value function return class method object string number boolean integer float array list map filter
sort search find replace insert delete update create read write open close start stop begin finish first
last left right top bottom north south east west spring summer autumn winter january february march april
june july august september october november december monday tuesday wednesday thursday friday saturday
sunday red green blue yellow white black orange purple brown silver golden father mother brother sister
daughter friend teacher doctor student worker farmer soldier sailor writer singer bread butter cheese apple
potato tomato onion coffee sugar pepper chicken soup kitchen table chair window garden forest mountain river
ocean island desert valley village street market station airport hospital library museum music picture movie
theatre dance painting photograph newspaper magazine television telephone internet computer science physics
chemistry biology mathematics geometry algebra equation theorem experiment measure distance temperature
pressure energy velocity gravity electron molecule planet galaxy universe evolution species animal elephant
tiger rabbit monkey horse cow sheep dog bird eagle fish whale insect butterfly spider flower quickly slowly
suddenly probably certainly usually sometimes often rarely nearly almost exactly especially simply directly
immediately recently finally actually already perhaps together against beyond within beautiful difficult
dangerous expensive comfortable necessary available responsible successful traditional interesting wonderful
terrible horrible powerful careful useful helpful careless useless endless happiness darkness kindness
weakness movement agreement argument department environment entertainment establishment attention
information communication organization education application operation condition position tradition decision
television permission discussion conclusion revolution solution institution constitution contribution
understand remember forget believe imagine consider suggest describe explain compare contain include require
produce provide protect prevent support receive achieve improve increase reduce continue discover develop
running walking talking speaking writing reading listening learning teaching building growing moving living
playing working thinking looking asking answering opening closing starting ending winning losing giving
taking walked talked asked answered opened closed started ended wanted needed helped called looked turned
showed moved lived believed happened included continued followed stopped created spoken considered appeared
served died What Where When Why Who How Which This That These Those There Then They Their Our Your His Her
Its And But Not Please Write Tell Give Make Show Explain Describe Summarize Translate Answer Question
Example Note Remember Here Yes Sure Sorry Hello Thanks English French German Spanish Italian Chinese
Japanese Russian Arabic America Europe Africa Asia Australia London Berlin Madrid Rome Moscow Beijing Newton
Einstein Darwin Shakespeare Monday Friday automatic mechanical electrical chemical physical logical typical
original regular particular similar familiar popular secular nuclear circular modern ancient recent distant
present absent silent violent patient confident engine bicycle airplane helicopter submarine railway highway
traffic passenger luggage ticket journey adventure holiday weekend breakfast lunch dinner restaurant waiter
menu vegetable strawberry chocolate vanilla cinnamon blanket pillow mirror carpet ceiling basement balcony
chimney staircase bathroom bedroom furniture cupboard lawyer engineer scientist architect carpenter plumber
electrician journalist secretary president minister king queen prince princess castle dragon wizard knight
sword shield treasure pirate monster ghost legend history
"""

CODE = '''\
import json
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A place on the plane."""

    x: float
    y: float

    def distance(self, other: "Point") -> float:
        return math.sqrt((self.x - other.x) ** 2 + (self.y - other.y) ** 2)


def fibonacci(n: int) -> list[int]:
    values = [0, 1]
    while len(values) < n:
        values.append(values[-1] + values[-2])
    return values[:n]


def main() -> None:
    for index, value in enumerate(fibonacci(10)):
        if value % 2 == 0:
            print(f"{index}: {value} is even")
        else:
            print(index, value, sep=": ")
    try:
        with open("result.json", "w", encoding="utf-8") as file:
            json.dump({"ok": True, "items": [1, 2, 3]}, file)
    except OSError as error:
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()

function add(a, b) { return a + b; }
const names = ["Ada", "Grace", "Alan"].map((name) => name.toUpperCase());
console.log(names.join(", "), add(1, 2) === 3);
for (let i = 0; i < names.length; i++) { if (!names[i]) continue; }

#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 0; i < argc; ++i) { printf("%d %s\\n", i, argv[i]); }
    return 0;
}

SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name ORDER BY name LIMIT 10;
$ git status && make test | tail -n 20 > /tmp/out.txt
<html><body><h1 class="title">Hello, world!</h1><p>Text &amp; more</p></body></html>
y = softmax(q @ k.T / sqrt(d)) @ v; loss = -log(p[target]); w -= lr * grad
'''

CHAT = """\
system: You are a helpful assistant. Be brief.
user: What is the weather in Oslo?
assistant: It is 3 degrees and it rains. Would you like to know more?
message role="system" message role="user" message role="assistant" message role="tool" name="
think response tools call argument json key=" type="string" type="number" type="boolean" type="object"
index="1" type="tool-declare" type="thinking-effort" type="tool-choice" type="response-format"
`thinking_effort` guides on how much to think in your thinking channel (not including the response channel).
Now the system is invoked with `thinking_effort=max`.
# Tools
Here are the available tools, described in JSONSchema.

```json
[{"function":{"description":"Weather now","name":"get_weather","parameters":{"properties":{"city":
{"type":"string"},"days":{"type":"integer"}},"required":["city"],"type":"object"}},"type":"function"}]
```
{"id": 17, "name": "Ada", "tags": ["a", "b"], "score": 9.75, "active": true, "parent": null}
1. First point. 2. Second point. 3. Third point.
- one
- two
| name | value |
|---|---|
**bold** and *italic*, see [the page](https://example.org/index.html?q=1&lang=en) or write to me@example.org.
0 1 2 3 4 5 6 7 8 9 10 11 12 16 20 24 32 48 50 64 75 80 99 100 128 200 256 300 365 400 500 512 600 700 800 900
1000 1024 2024 2025 2026 3.14 2.718 0.5 0.01 -1 +7 12:30 09:15 1/2 50% 1e-6 0x1f
"""

SCRIPTS = """\
La rivière ne se presse pas, et pourtant elle arrive. Où est la gare, s'il vous plaît? Près du café.
Der Fluss hat es nicht eilig, und doch kommt er an. Wo ist der Bahnhof? Gehen Sie über die Brücke.
El río no tiene prisa, y sin embargo llega. ¿Dónde está la estación? Mañana será otro día, señor.
Il fiume non ha fretta, eppure arriva. Dov'è la stazione? È più avanti, a sinistra.
O rio não tem pressa, mas chega. Onde fica a estação? A manhã é clara e o pão está quente.
Nehir acele etmez ama yine de varır. Günaydın, nasılsınız? Çok iyiyim, teşekkür ederim.
Rzeka się nie spieszy, a jednak dociera. Dzień dobry, gdzie jest dworzec? Dziękuję bardzo.
Река не спешит, но приходит. Где находится вокзал? Спасибо, всё хорошо. Доброе утро, как дела?
Το ποτάμι δεν βιάζεται, κι όμως φτάνει. Πού είναι ο σταθμός; Καλημέρα, τι κάνετε; Ευχαριστώ πολύ.
النهر لا يستعجل ومع ذلك يصل. أين المحطة من فضلك؟ صباح الخير، كيف حالك؟ شكرا جزيلا.
הנהר אינו ממהר, ובכל זאת הוא מגיע. איפה התחנה? בוקר טוב, תודה רבה.
नदी जल्दी नहीं करती, फिर भी पहुँच जाती है। स्टेशन कहाँ है? नमस्ते, आप कैसे हैं? बहुत धन्यवाद।
แม่น้ำไม่รีบ แต่ก็ไปถึง สถานีอยู่ที่ไหน สวัสดีครับ ขอบคุณมาก
河水不急，却总会到达。车站在哪里？请往前走，在第二条街左转。你好，今天天气怎么样？谢谢，我很好。
机器先把文字切成小块，再给每一块一个数字。模型看到前面的文字，猜下一块是什么。猜得越多，就越准确。
我们学习语言，思考问题，写出答案。时间是最好的老师。中国，日本，世界，人工智能，计算机，数据，系统，用户，信息。
河水不急，卻總會到達。車站在哪裡？請往前走。謝謝您，再見。
川は急がない。それでも着く。駅はどこですか。まっすぐ行って、二番目の角を左に曲がってください。ありがとうございます。
コンピュータは文章を小さな部分に分けて、それぞれに番号を付けます。こんにちは、お元気ですか。
강물은 서두르지 않지만 도착한다. 역이 어디에 있습니까? 안녕하세요, 오늘 날씨가 어떻습니까? 감사합니다.
→ ← ≤ ≥ ≠ ± × ÷ ∞ √ ∑ ∫ ∂ α β γ δ λ π σ θ • … — – “quoted” ‘single’ € £ ¥ © ° ² ½ 😀 🎉 👍 ✅
"""

CORPUS = (PROSE, WORDS, CODE, CHAT, SCRIPTS)
